"""``python -m hf_bayes.cli`` is the command ``hf-bayes``: ``accelerate launch -m hf_bayes.cli train run.yaml``."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default ``sys.argv[1:]``, and return the exit status.

    An interrupt during the first imports is as silent as a later one.
    """
    try:
        from hf_bayes.cli.main import main

        return main(arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
