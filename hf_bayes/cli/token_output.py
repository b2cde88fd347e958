"""The output of scored or generated texts: a table of tokens, JSON lines, or a heat map in HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_bayes.cli.json_text import json_text
from hf_bayes.cli.output_file import check_file, write_file
from hf_bayes.core.text_safety import visible_line
from hf_bayes.pipelines.records import PARTS
from hf_bayes.pipelines.rendering import context_of, to_html


@dataclass
class OutputArguments:
    """The form of the output."""

    _argument_group_name = "output"

    json: bool = field(default=False, metadata={"help": "Print one JSON object for each text, in place of tables."})
    html: str | None = field(
        default=None, metadata={"help": "Also write a page with the tokens in colour to this file."}
    )

    def __post_init__(self) -> None:
        if self.html is not None:
            check_file(self.html, flag="--html")


def show(records: Sequence[Mapping[str, Any]], output: OutputArguments) -> None:
    """Print the records as tables or as JSON lines, and write the page if it is wanted."""
    if output.html is not None:
        write_file(Path(output.html), to_html(records), flag="--html")
    if output.json:
        for record in records:
            print(json_text(record))
        return
    console = Console()
    for number, record in enumerate(records, 1):
        console.print(table(record, title=f"{number}. {_beginning(record)}" if len(records) > 1 else None))


def _beginning(record: Mapping[str, Any]) -> str:
    """Return the prompt of a generated text, or a scored text, on one line."""
    text = context_of(record).prompt if "generated_text" in record else record["text"]
    return visible_line(" ".join(text.split()))


def table(record: Mapping[str, Any], *, title: str | None = None) -> Table:
    """Return a table with a row for each token, in nats, and a last row: the sum of log-probabilities, and the means.

    The line below it has the log-probability of the whole text, which is not this sum (docs/uncertainty.md).

    Args:
        title: a line above the table, cut to its width.
    """
    means = record["uncertainty"]
    whole = Text(f"log p(sequence) {means['sequence_logprob']:.3f}")
    shown = Table(box=None, padding=(0, 2, 0, 0), show_footer=True, caption=whole, caption_justify="left")
    if title is not None:
        shown.title, shown.title_justify = Text(title, no_wrap=True, overflow="ellipsis"), "left"
    shown.add_column("token", footer=f"{len(record['tokens'])} tokens", overflow="fold")
    tokenwise = f"{means['sequence_logprob_tokenwise']:.3f}"
    shown.add_column("log-probability", footer=tokenwise, justify="right", no_wrap=True)
    for part in PARTS:
        shown.add_column(part, footer=f"{means[part]:.3f}", justify="right", no_wrap=True)
    for token in record["tokens"]:
        numbers = (f"{token[name]:.3f}" for name in ("logprob", *PARTS))
        shown.add_row(Text(visible_line(token["token"])), *numbers)  # as Text: square brackets are not markup
    return shown
