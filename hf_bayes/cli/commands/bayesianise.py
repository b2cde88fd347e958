"""``hf-bayes bayesianise``: make a posterior of a finished LoRA adapter from held-out rows, without training.

docs/training_free.md explains the method. The held-out file has the form of the test file of ``hf-bayes evaluate``.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from accelerate import PartialState

from hf_bayes.cli.command import Command
from hf_bayes.cli.evaluation.case import TEST, Target
from hf_bayes.cli.evaluation.cases import CASES, case_of, described, own_arguments
from hf_bayes.cli.padding import give_padding
from hf_bayes.fit.training_free import fit_training_free, load_adapter, read_adapter
from hf_bayes.methods.registry import METHODS
from hf_bayes.models.input_check import context_of
from hf_bayes.models.loading.posterior import load_tokenizer
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.storage import check_writable, replaces


@dataclass
class BayesianiseArguments:
    """The adapter, the held-out rows and the posterior."""

    _argument_group_name = "adapter and posterior"

    adapter: str = field(metadata={"help": "Folder or Hub id of a finished LoRA adapter, or of a posterior."})
    heldout: str | None = field(
        default=None, metadata={"help": "File of rows with labels that were not used in training. Required."}
    )
    text_column: str = field(
        default="text", metadata={"help": "Column of the text, or of the words of a tagger, in a file of rows."}
    )
    output_dir: str = field(default="posterior", metadata={"help": "Folder of the posterior."})
    base_model: str | None = field(default=None, metadata={"help": "Folder or id of the base model, if it has moved."})
    labels: list[str] = field(
        default_factory=list,
        metadata={"help": "Classes in the order of the outputs, if the base model does not name them."},
    )
    scales: Literal["one", "layer"] = field(
        default="one", metadata={"help": "One scale of the noise for all layers, or one for each layer."}
    )
    tolerance: float = field(
        default=1.0, metadata={"help": "Largest rise of the held-out loss, in standard errors of the difference."}
    )
    batch_size: int = field(default=8, metadata={"help": "Windows or rows of a batch."})
    seed: int = field(default=0, metadata={"help": "Seed of the members."})


def bayesianise(args: BayesianiseArguments, *own: Any) -> Posterior:
    """Make a posterior of a finished LoRA adapter from held-out rows, without training, and save it.

    It is as wide as the held-out rows allow. The command says whether it predicts better than a temperature does.

    Args:
        args: the adapter, the rows and the posterior.
        own: the arguments of every task.
    Raises:
        ValueError, OSError: without held-out rows, and for an adapter, a file or labels that do not fit each other.
    """
    fields: dict[str, Any] = {"scales": args.scales, "tolerance": args.tolerance}
    method = METHODS["training_free"](**fields)  # a wrong setting is refused before a model is loaded
    if args.heldout is None:
        raise ValueError(
            "--heldout is needed, got none: the posterior is as wide as held-out rows allow. Give a file of rows with "
            "labels that the adapter was not trained on"
        )
    _check_output(args)
    posterior = _with_labels(read_adapter(args.adapter), args.labels)
    model = _load(posterior, args)
    model.to(PartialState().device)  # the device that training would use
    tokenizer = load_tokenizer(args.adapter, posterior=posterior, base_model=args.base_model)
    give_padding(tokenizer, model.core.config)
    config = described(posterior.config, model)
    if "likelihood" in config.head:
        raise ValueError(
            f"{args.adapter} has the likelihood {config.head['likelihood'].get('name')}, and this command reads the "
            "labels of transformers' heads: call hf_bayes.fit_training_free(model, heldout), which takes any likelihood"
        )
    case = case_of(config, args.adapter)
    chosen = own_arguments(case, own, args.adapter)
    target = Target(config.head, context_of(model.core)[0], args.text_column)
    sets = case.read({TEST: args.heldout}, tokenizer, target, chosen)
    collate = case.collate(tokenizer, sets, chosen)
    found = fit_training_free(
        model, sets[TEST], method, collate=collate, batch_size=args.batch_size, tokenizer=tokenizer, seed=args.seed
    )
    found.save_pretrained(args.output_dir)
    print(f"{found.config.diagnostics['verdict']}\nposterior: {args.output_dir}")
    return found


def _check_output(args: BayesianiseArguments) -> None:
    """Check that the posterior can be saved, and that the save would not replace the adapter that is read."""
    if os.path.isdir(args.adapter) and replaces(args.output_dir, args.adapter):
        raise ValueError(
            f"--output_dir {args.output_dir}: a save there would replace {args.adapter}, of which the posterior is "
            "made. Name another folder"
        )
    check_writable(args.output_dir)


def _with_labels(posterior: Posterior, labels: list[str]) -> Posterior:
    """Return the posterior with the names of its classes, which a plain adapter does not hold."""
    if not labels:
        return posterior
    config = posterior.config
    if known := config.head.get("labels"):
        raise ValueError(f"--labels: {posterior.source} has labels of its own ({', '.join(known)}), leave them out")
    if config.task == "causal_lm":
        raise ValueError("--labels: not for a language model, leave it out")
    labelled = dataclasses.replace(config, head={**config.head, "labels": labels})
    return dataclasses.replace(posterior, config=labelled).read_from(posterior.source)


def _load(posterior: Posterior, args: BayesianiseArguments) -> Any:
    """Load the adapter on its base model."""
    try:
        return load_adapter(posterior, base_model=args.base_model)
    except ValueError as error:
        if args.labels or posterior.config.head.get("labels") or posterior.config.task == "causal_lm":
            raise
        raise ValueError(
            f"{error}. A classifier's adapter does not hold the names of its classes: if the base model does not "
            "either, give --labels in the order of the outputs"
        ) from error


COMMAND = Command(
    run=bayesianise,
    arguments=(BayesianiseArguments, *dict.fromkeys(case.arguments for case in CASES.values())),
    example="bayesianise adapter --heldout dev.csv --label_column intent --output_dir posterior",
    first="adapter",
)
