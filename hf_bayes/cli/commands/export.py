"""``hf-bayes export``: a posterior for users without hf_bayes, one of its networks, a Space, or a new model card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_bayes.cli.card import rewrite_card
from hf_bayes.cli.command import Command
from hf_bayes.models.exporting import export_adapter, export_model, network_of_draw, network_of_mean
from hf_bayes.pipelines.space import write_space
from hf_bayes.posteriors.compat import is_repo_id
from hf_bayes.posteriors.custom_generate import export_custom_generate
from hf_bayes.posteriors.model_card import known_fields
from hf_bayes.posteriors.posterior import Posterior

_TARGETS = ("custom_generate", "model", "adapter", "space", "card")


@dataclass
class ExportArguments:
    """The posterior and one export: --custom_generate, --model, --adapter, --space or --card."""

    _argument_group_name = "export"

    posterior: str = field(metadata={"help": "A posterior directory or a repository of the Hub."})
    custom_generate: str | None = field(
        default=None,
        metadata={"help": "New folder for a repository that runs all members without hf_bayes."},
    )
    model: str | None = field(
        default=None, metadata={"help": "New folder for one network as an ordinary model, adapter merged."}
    )
    adapter: str | None = field(default=None, metadata={"help": "New folder for one network as a plain peft adapter."})
    space: str | None = field(
        default=None, metadata={"help": "New folder for a Space of the Hub with the page of hf-bayes demo."}
    )
    card: bool = field(
        default=False,
        metadata={"help": "Write a posterior's model card anew. License, languages, data sets and tags stay."},
    )
    results: str | None = field(
        default=None, metadata={"help": "results.json of hf-bayes evaluate, for the card (with --card)."}
    )
    benchmark: str | None = field(
        default=None,
        metadata={"help": "The Hub's benchmark of --results, as dataset:task:metric, for its leaderboard."},
    )
    text: str | None = field(
        default=None, metadata={"help": "A text for the card's heat map, if the posterior is a language model's."}
    )
    member: int | None = field(
        default=None, metadata={"help": "Number of the draw, from 0 (with --model or --adapter)."}
    )
    mean: bool = field(
        default=False, metadata={"help": "The mean of a Gaussian posterior (with --model or --adapter)."}
    )
    members: int | None = field(
        default=None,
        metadata={"help": "Members of --custom_generate. Default: all draws, or 10 draws of a Gaussian."},
    )
    compare: str | None = field(
        default=None, metadata={"help": "A second posterior of the Hub to show in the Space, beside the first."}
    )
    repo_id: str | None = field(
        default=None, metadata={"help": "Repository id in the examples of the model card. It is not kept."}
    )
    base_model: str | None = field(default=None, metadata={"help": "Folder or id of the base model, if it has moved."})

    def __post_init__(self) -> None:
        if empty := [name for name in _TARGETS if getattr(self, name) == ""]:
            raise ValueError(f"--{empty[0]} must be a folder, got an empty name: name a new one")
        given = [name for name in _TARGETS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            flags = ", ".join(f"--{name}" for name in _TARGETS)
            raise ValueError(f"give one of {flags}, got {', '.join(given) or 'none'}")
        (target,) = given
        single = target in ("model", "adapter")
        if single and (self.member is None) != self.mean:
            raise ValueError(f"--{target} is one network: give --member K or --mean, one of them")
        belongs = {"member": single, "mean": single, "members": target == "custom_generate",
                   "repo_id": target in ("custom_generate", "card"), "compare": target == "space",
                   "base_model": target in ("model", "card"), "results": target == "card",
                   "benchmark": target == "card", "text": target == "card"}  # fmt: skip
        for name, fits in belongs.items():
            if not fits and getattr(self, name) is not None and getattr(self, name) is not False:
                raise ValueError(f"--{name} does not go with --{target}: leave it out")

        if self.repo_id is not None and not is_repo_id(self.repo_id):
            raise ValueError(f"--repo_id must be a repository of the Hub such as user/posterior, got {self.repo_id!r}")

    def network(self, posterior: Posterior) -> Tensor:
        """Return the network [d] of ``member`` or ``mean``."""
        return network_of_mean(posterior) if self.member is None else network_of_draw(posterior, self.member)


def export(args: ExportArguments) -> None:
    """Write a posterior for other software: transformers alone, peft alone, or a Space of the Hub.

    --custom_generate writes code, which its users run: read it before you publish it. hf_bayes never runs it.

    Raises:
        ValueError: for a posterior that the export cannot represent, naming the reason.
        OSError: if there is no posterior, or a folder cannot be written.
    """
    if args.card:
        rewrite_card(args.posterior, results=args.results, benchmark=args.benchmark, text=args.text,
                     repo_id=args.repo_id, base_model=args.base_model)  # fmt: skip
        print(f"card: {args.posterior}")
        return
    name, folder = next((name, getattr(args, name)) for name in _WORK if getattr(args, name) is not None)
    _WORK[name](args, folder)
    print(f"{name}: {folder}")


def _custom_generate(args: ExportArguments, folder: str) -> None:
    posterior = Posterior.from_pretrained(args.posterior)
    card: dict[str, Any] = dict(known_fields(posterior.folder)) if posterior.folder else {}
    export_custom_generate(posterior, folder, members=args.members, repo_id=args.repo_id, **card)


def _model(args: ExportArguments, folder: str) -> None:
    posterior = Posterior.from_pretrained(args.posterior)
    export_model(posterior, args.network(posterior), folder, base_model=args.base_model)


def _adapter(args: ExportArguments, folder: str) -> None:
    posterior = Posterior.from_pretrained(args.posterior)
    export_adapter(posterior, args.network(posterior), folder)


def _space(args: ExportArguments, folder: str) -> None:
    write_space(folder, [args.posterior, *([args.compare] if args.compare else [])])


_WORK: dict[str, Callable[[ExportArguments, str], None]] = {
    "custom_generate": _custom_generate, "model": _model, "adapter": _adapter, "space": _space,
}  # fmt: skip
"""The flag of an export -> a function that writes it to a folder."""

COMMAND = Command(
    run=export,
    arguments=(ExportArguments,),
    example="export posterior --custom_generate repository --repo_id user/posterior",
    first="posterior",
)
