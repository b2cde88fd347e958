"""The arguments of ``hf-bayes continual``: the base model, the episodes, and the training of each method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_bayes.cli.arguments import ModelArguments, mapping, method_config
from hf_bayes.cli.token_windows import token_windows
from hf_bayes.core.config import MethodConfig


@dataclass
class LoraArguments(ModelArguments):
    """The base model and its LoRA, by default with the rank and scale of the paper (section 5.2)."""

    lora_alpha: int = field(default=32, metadata={"help": "LoRA's scale is alpha / rank."})

    def __post_init__(self) -> None:
        if self.lora_rank is not None and self.lora_rank < 1:
            raise ValueError(f"lora_rank must be at least 1, got {self.lora_rank}: episodes are learnt by a LoRA")


@dataclass
class ContinualArguments:
    """The episodes and the settings of their training."""

    _argument_group_name = "episodes"

    episodes: list[str] = field(metadata={"help": "Files, globs, or NAME[/CONFIG][:SPLIT] of the Hub, in this order."})
    methods: list[str] = field(
        default_factory=lambda: ["sequential", "offline", "laplace_diagonal", "laplace_kronecker", "mean_field"],
        metadata={
            "help": "By default sequential, offline, laplace_diagonal, laplace_kronecker, mean_field. They are "
            "compared with single, which learns each text alone."
        },
    )
    held_out: float = field(default=0.15, metadata={"help": "Share of each episode, at its end, for testing."})
    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    window: int | None = field(
        default=None, metadata={"help": "Tokens in a window. Default: 2048, or the model's context if less."}
    )
    stride: int | None = field(
        default=None, metadata={"help": "New tokens in a window. The rest is context. Default: half a window."}
    )
    prior_std: float = field(default=0.1, metadata={"help": "Std of the first prior, and of priors not inherited."})
    strength: float = field(default=1.0, metadata={"help": "lambda of precision_new = precision_old + lambda F."})
    estimator: str = field(
        default="ef_sequence", metadata={"help": "F: ef_sequence (the paper's), ef_token, ggn: see docs/laplace.md."}
    )
    mean_field_args: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Fields of MeanFieldConfig as JSON."}
    )


def overlap_of(stride: int | None, window: int) -> int:
    """Return the tokens that neighbouring windows share.

    Raises:
        ValueError: for a stride outside of 1 to ``window``.
    """
    if stride is None:
        return window - window // 2
    if not 1 <= stride <= window:
        raise ValueError(f"--stride must be 1 to the window of {window} tokens, got {stride}: it counts new tokens")
    return window - stride


def methods(given: ContinualArguments) -> dict[str, MethodConfig]:
    """Return the training settings of each row of the table."""
    common: dict[str, Any] = {"prior_std": given.prior_std}
    laplace = {**common, "estimator": given.estimator, "strength": given.strength}
    known = {
        **dict.fromkeys(("single", "sequential", "offline"), method_config("map", common)),
        **{
            f"laplace_{name}": method_config("laplace", {**laplace, "structure": name})
            for name in ("diagonal", "kronecker")
        },
        "mean_field": method_config("mean_field", {**common, **mapping(given.mean_field_args)}),
    }
    if len(set(given.methods)) < len(given.methods):
        raise ValueError(f"methods has a name twice, got {', '.join(given.methods)}: give each once")
    if unknown := sorted(set(given.methods) - set(known)):
        raise ValueError(f"methods {unknown} are unknown: choose of {', '.join(known)}")
    return {name: known[name] for name in given.methods}


def refuse_push(args: Any) -> None:
    """Refuse ``push_to_hub``: Trainer would make a repository and upload nothing."""
    if args.push_to_hub:
        raise ValueError(
            "push_to_hub is refused: there is a posterior for each method and episode, and no one repository for all "
            "of them. Push those you want afterwards: Posterior.from_pretrained(FOLDER).push_to_hub(ID)"
        )


def windows(episodes: Sequence[str], texts: Sequence[Any], tokenizer: Any, **cut: Any) -> list[Any]:
    """Return ``token_windows`` of one part of each episode."""
    found = []
    for episode, rows in zip(episodes, texts, strict=True):
        try:
            found.append(token_windows(rows, tokenizer, **cut))
        except ValueError as error:
            raise ValueError(f"a part of {episode!r}: {error}") from error
    return found
