"""``hf-bayes diagnose``: show the diagnostics of a posterior as a table with the verdict, and as a figure.

The command reads the JSON and safetensors files of a directory or repository and needs no base model.
docs/diagnostics.md explains the panels. Characters in these files that act on a terminal are shown as codes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from hf_bayes.cli.command import Command
from hf_bayes.cli.diagnosis_figure import plot
from hf_bayes.cli.diagnosis_table import table
from hf_bayes.cli.output_file import check_file, write_figure
from hf_bayes.posteriors import hub
from hf_bayes.posteriors.config import CONFIG, PosteriorConfig
from hf_bayes.posteriors.directory import TRACE
from hf_bayes.posteriors.storage import POSTERIOR, read_directory


@dataclass
class DiagnosisArguments:
    """The posterior and the figure."""

    posterior: str = field(metadata={"help": "A posterior directory or a repository of the Hub."})
    output: str = field(default="diagnostics.png", metadata={"help": "File of the figure."})

    def __post_init__(self) -> None:
        check_file(self.output, flag="--output", formats=(".png", ".pdf", ".svg"))


def diagnose(args: DiagnosisArguments) -> None:
    """Show whether the chains of a run converged: a table with a verdict, and a figure.

    Raises:
        ValueError, OSError: for a directory that is no posterior, or holds diagnostics that cannot be shown.
    """
    directory = hub.fetch(args.posterior, patterns=hub.FILES)
    wanted = (CONFIG, TRACE)
    files = read_directory(directory, format=POSTERIOR, only=lambda name: name in wanted)
    if CONFIG not in files:
        raise ValueError(f"{directory} holds no {CONFIG}: it is not a posterior")
    config, trace = PosteriorConfig.from_dict(files[CONFIG]).to_dict(), files.get(TRACE, {})
    console = Console()
    try:
        shown, drawn = table(config), plot(config, trace)
    except (TypeError, LookupError, AttributeError, ArithmeticError, ValueError) as error:
        raise ValueError(
            f"{directory}: the diagnostics in {CONFIG} or {TRACE} are not of the types that a run saves "
            f"({type(error).__name__}: {error}): fetch or save the posterior again"
        ) from error
    console.print(shown)
    if not shown.row_count:
        console.print("No diagnostics are stored. BayesianTrainer stores them; for your own loop see docs/own_loop.md.")
    if drawn is None:
        console.print("There is nothing to plot: this posterior has no log of the chains of a run.")
        return
    write_figure(Path(args.output), drawn, flag="--output", dpi=130)
    console.print(f"figure: {args.output}")


COMMAND = Command(run=diagnose, arguments=(DiagnosisArguments,), example="diagnose posterior", first="posterior")
