"""``hf-bayes-diagnose DIRECTORY``: show the diagnostics of a posterior as a table with the verdict, and as a figure.

The command reads the JSON and safetensors files of a directory or repository and needs no base model.
docs/diagnostics.md explains the panels. Characters in these files that act on a terminal are shown as codes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hf_bayes.cli.diagnosis_figure import plot
from hf_bayes.cli.diagnosis_table import table
from hf_bayes.core.text_safety import readable_errors
from hf_bayes.posteriors import hub
from hf_bayes.posteriors.config import CONFIG
from hf_bayes.posteriors.directory import TRACE
from hf_bayes.posteriors.storage import POSTERIOR, read_directory


@readable_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="hf-bayes-diagnose", description="Show the diagnostics of a posterior.")
    parser.add_argument("posterior", help="directory or Hub id of a posterior")
    parser.add_argument(
        "--output", type=Path, default=Path("diagnostics.png"), help="file of the figure (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    directory = hub.fetch(args.posterior, patterns=hub.FILES)
    wanted = (CONFIG, TRACE)
    files = read_directory(directory, format=POSTERIOR, only=lambda name: name in wanted)
    config, trace = files[CONFIG], files.get(TRACE, {})
    console = Console()
    console.print(table(config))
    drawn = plot(config, trace)
    if drawn is None:
        console.print("There is nothing to plot: this posterior has no log of the chains of a run.")
        return
    drawn.savefig(args.output, dpi=130)
    console.print(f"figure: {args.output}")


if __name__ == "__main__":
    main()
