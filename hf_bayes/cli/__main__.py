"""``python -m hf_bayes.cli`` is the command ``hf-bayes``: ``accelerate launch -m hf_bayes.cli train run.yaml``."""

from __future__ import annotations

import sys

from hf_bayes.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
