"""``hf-bayes score``: show the uncertainty of each token of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_bayes.cli.command import Command
from hf_bayes.cli.local_files import matching, suffix_of
from hf_bayes.cli.parsing import check_count
from hf_bayes.cli.posterior_arguments import PosteriorArguments, given_texts
from hf_bayes.cli.row_places import place_of
from hf_bayes.cli.token_output import OutputArguments, show


@dataclass
class ScoreArguments:
    """The texts to score."""

    _argument_group_name = "texts"

    text: list[str] = field(default_factory=list, metadata={"help": "The text, or several, each in quotes."})
    file: str | None = field(
        default=None,
        metadata={"help": "A .txt file is one text; a .csv, .jsonl or .parquet file has one in each row."},
    )
    text_column: str = field(default="text", metadata={"help": "Column of the texts in such a file."})
    max_length: int | None = field(default=None, metadata={"help": "Tokens kept of a text. Default: all."})
    batch_size: int = field(default=8, metadata={"help": "Texts of a batch."})

    def __post_init__(self) -> None:
        check_count("max_length", self.max_length, "the tokens kept of a text")

    @property
    def cut(self) -> dict[str, Any]:
        """The arguments of the tokenizer that cut the texts."""
        return {} if self.max_length is None else {"truncation": True, "max_length": self.max_length}


def refuse_short(given: Sequence[str], tokenizer: Any, texts: ScoreArguments) -> None:
    """Raise a ValueError for a text of fewer than two tokens, with its place: its first token is not scored."""
    for number, text in enumerate(given):
        count = len(tokenizer(text, **texts.cut)["input_ids"])
        if count < 2:
            place = f"text {number + 1} of {len(given)}" if texts.file is None else _place_of_text(texts.file, number)
            advice = "drop it" if texts.max_length is None else "drop it, or raise --max_length"
            raise ValueError(
                f"{place}: a text needs two tokens or more to be scored, got {count} in {text!r:.100}: {advice}"
            )


def _place_of_text(file: str, number: int) -> str:
    """Return words for a text of a file or glob: a .txt file is one text, see ``texts_in``."""
    files = matching(file)
    return files[number] if suffix_of(files[0]) == ".txt" else place_of(file, number)


def score(posterior: PosteriorArguments, texts: ScoreArguments, output: OutputArguments) -> None:
    """Show the log-probability and the total, aleatoric and epistemic uncertainty of each token of given texts.

    Numbers are in nats. The last row has the log-probability of the text and the means over its tokens.

    Raises:
        ValueError: for a posterior of another task, no text, or a text of fewer than two tokens.
    """
    given = given_texts(texts.text, texts.file, column=texts.text_column, flag="--text")
    run = posterior.text_pipeline("score")
    refuse_short(given, run.tokenizer, texts)
    show(run.score(given, batch_size=texts.batch_size, **texts.cut), output)


COMMAND = Command(
    run=score,
    arguments=(PosteriorArguments, ScoreArguments, OutputArguments),
    example='score posterior --text "The mitochondrion is the powerhouse of the cell."',
    first="posterior",
)
