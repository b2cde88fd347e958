"""``hf-bayes generate``: continue a prompt and show the uncertainty of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from transformers import set_seed

from hf_bayes.cli.command import Command
from hf_bayes.cli.parsing import check_count
from hf_bayes.cli.posterior_arguments import PosteriorArguments, given_texts
from hf_bayes.cli.token_output import OutputArguments, show
from hf_bayes.core.rng import require_seed


@dataclass
class PromptArguments:
    """The prompts and their continuation."""

    _argument_group_name = "prompts"

    prompt: list[str] = field(default_factory=list, metadata={"help": "The prompt, or several, each in quotes."})
    file: str | None = field(
        default=None,
        metadata={"help": "A .txt file is one prompt; a .csv, .jsonl or .parquet file has one in each row."},
    )
    text_column: str = field(default="text", metadata={"help": "Column of the prompts in such a file."})
    max_new_tokens: int = field(default=50, metadata={"help": "The largest number of new tokens."})
    do_sample: bool = field(default=False, metadata={"help": "Draw tokens, in place of the most probable ones."})
    temperature: float | None = field(default=None, metadata={"help": "Temperature of the draws (with --do_sample)."})
    top_p: float | None = field(
        default=None, metadata={"help": "Probability of the tokens that may be drawn (with --do_sample)."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the draws."})

    def __post_init__(self) -> None:
        require_seed(self.seed, largest=2**32 - 1)  # numpy, which transformers seeds, takes no larger one
        check_count("max_new_tokens", self.max_new_tokens, "the tokens of an answer")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ValueError(
                f"--temperature must be a finite number > 0, got {self.temperature}: for the most probable tokens, "
                "leave it and --do_sample out"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"--top_p must be above 0 and at most 1, got {self.top_p}: it is a probability")

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of ``generate``.

        Raises:
            ValueError: for a setting of draws without ``do_sample``.
        """
        draws = {"temperature": self.temperature, "top_p": self.top_p}
        given = {name: value for name, value in draws.items() if value is not None}
        if given and not self.do_sample:
            raise ValueError(f"--{next(iter(given))} is for draws: add --do_sample, or leave it out")
        return {"max_new_tokens": self.max_new_tokens, "do_sample": self.do_sample, **given}


def refuse_empty(prompts: list[str], tokenizer: Any) -> None:
    """Raise a ValueError for a prompt without tokens: beside longer ones it would be continued from padding."""
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip() and not tokenizer(prompt)["input_ids"]:
            raise ValueError(
                f"prompt {number} of {len(prompts)} is {prompt!r}, which has no token, and this tokenizer adds none: "
                "give a text"
            )


def generate(posterior: PosteriorArguments, prompts: PromptArguments, output: OutputArguments) -> None:
    """Continue prompts, and show the log-probability and the uncertainty of each new token.

    Numbers are in nats. The last row has the log-probability of the continuation and the means over its tokens.

    Raises:
        ValueError: for a posterior of another task, no prompt, or settings that do not go together.
    """
    settings = prompts.settings
    given = given_texts(prompts.prompt, prompts.file, column=prompts.text_column, flag="--prompt")
    run = posterior.text_pipeline("generate")
    refuse_empty(given, run.tokenizer)
    set_seed(prompts.seed)
    show([record for found in run(given, **settings) for record in found], output)


COMMAND = Command(
    run=generate,
    arguments=(PosteriorArguments, PromptArguments, OutputArguments),
    example='generate posterior --prompt "The mitochondrion is the" --html heat_map.html',
    first="posterior",
)
