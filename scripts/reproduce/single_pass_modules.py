"""The variance behind each module of the trained classifier in a single pass of low rank, over that of members.

    python -m scripts.reproduce.single_pass_modules --work out/single_pass

It also has the ratios of epistemic uncertainty (EU) for the same rows. The command makes these two tables of
docs/results/single_pass.md alone; ``single_pass`` makes them, too.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import set_seed
from transformers.utils import logging

from hf_bayes import Posterior
from hf_bayes.fit.distil_report import rank_correlation
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.single_pass.driver import SinglePass
from hf_bayes.models.single_pass.gaussian_tensor import mean_of
from scripts.reproduce.report import RESULTS, as_text, render, table
from scripts.reproduce.single_pass_subjects import Subject, classifier, kept, posteriors, without_labels

MEMBERS, PART, RANK = 96, 24, 16

MODULES = (
    "attention.self.value", "attention.self", "attention.output.dense", "attention.output.LayerNorm",
    "intermediate", "output.dense", "output.LayerNorm",
)  # fmt: skip
"""The modules of a block, in their order. The blocks with random weights are the last two."""

PATHS = (*(f"layer.{block}.{name}" for block in (4, 5) for name in MODULES), "pooler.dense", "pooler", "classifier")

WAYS: dict[str, dict[str, Any]] = {
    "backward, 2": {"structure": "backward", "rank": 2},
    "low rank, 16": {"structure": "low_rank", "rank": RANK, "second_order": False},
    "low rank, 16, second order": {"structure": "low_rank", "rank": RANK, "second_order": True},
    "low rank, 4": {"structure": "low_rank", "rank": 4, "second_order": False},
    "low rank, 4, second order": {"structure": "low_rank", "rank": 4, "second_order": True},
}


class Read:
    """A context that calls ``use(path, output)`` with the output of each module of ``PATHS``."""

    def __init__(self, model: Any, use: Callable[[str, Any], None]) -> None:
        found = {path: next(m for name, m in model.named_modules() if name.endswith(path)) for path in PATHS}
        self.handles = [module.register_forward_hook(self._hook(path, use)) for path, module in found.items()]

    @staticmethod
    def _hook(path: str, use: Callable[[str, Any], None]) -> Callable[..., None]:
        return lambda module, args, output: use(path, output[0] if isinstance(output, tuple) else output)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def member_moments(model: Any, theta: Tensor, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the mean and the variance over members of the output of each module."""
    rows = len(batch["input_ids"])
    sums: dict[str, list[Any]] = {path: [0.0, 0.0] for path in PATHS}

    def add(path: str, output: Tensor) -> None:
        values = output.double().unflatten(0, (-1, rows))
        for place, part in enumerate((values, values.square())):
            sums[path][place] = sums[path][place] + part.sum(0) / len(theta)

    with Read(model.model, add):
        for some in theta.split(PART):
            with model.members.bind(some):
                model.members.logits(batch)
    unbiased = len(theta) / (len(theta) - 1)
    return {path: (mean, (square - mean.square()) * unbiased) for path, (mean, square) in sums.items()}


@torch.no_grad()
def modules(subject: Subject, posterior: Posterior) -> dict[str, Any]:
    """Return the figures for the first batch of each set."""
    set_seed(0)
    kind: Any = MODELS[subject.task]
    how: dict[str, Any] = {"members": MEMBERS, "prediction": "members", "check_base": False}
    model = kind.from_pretrained(posterior, base_model=subject.base(), **how)
    theta, gaussian = model.theta.detach().clone(), model.posterior.approximation
    one = SinglePass(model.members, gaussian.means[0], gaussian.covariances[0], rank=RANK)
    batches = {name: without_labels(found[0]) for name, found in subject.sets.items()}
    ratios: dict[str, dict[str, list[float]]] = {name: {} for name in batches}
    for name, batch in batches.items():
        wanted = member_moments(model, theta, batch)

        def compare(path: str, output: Any, wanted: Any = wanted, own: Any = ratios[name]) -> None:
            (mean, variance), spread = wanted[path], output.spread
            error, moved = (float((m - mean).norm() / mean.norm()) for m in (mean_of(output), one_mean(output)))
            own[path] = [round(float(spread.variance.sum() / variance.sum()), 3), round(error, 3), round(moved, 3)]

        with Read(model.model, compare), one.open():
            model.members.forward(batch)
    return {"modules": ratios, "eu": uncertainties(model, batches), "rows": len(batch["input_ids"]), "members": MEMBERS}


def one_mean(output: Any) -> Tensor:
    """Return the mean of an output with its drift."""
    found: Tensor = mean_of(output) + output.spread.drift
    return found


def uncertainties(model: Any, batches: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, list[float]]]:
    """Return by way and set: mean EU over that of the members, and the rank correlation."""

    def read() -> dict[str, Tensor]:
        return {name: model(**batch).epistemic.flatten().double() for name, batch in batches.items()}

    reference = read()
    found: dict[str, dict[str, list[float]]] = {}
    for way, options in WAYS.items():
        model.single_pass(**options)
        own = read()
        found[way] = {
            name: [round(float(own[name].sum() / eu.sum()), 3), round(rank_correlation(eu, own[name]), 3)]
            for name, eu in reference.items()
        }
    return found


def blocks(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables."""
    sets = list(found["modules"])
    heads = [f"{what}, {name}" for name in sets for what in ("variance", "mean weights", "with drift")]
    lines = [
        [path, *(f"{value:.2f}" for name in sets for value in found["modules"][name][path])]
        for path in found["modules"][sets[0]]
    ]
    eu = [[way, *(f"{value:.2f}" for name in sets for value in each[name])] for way, each in found["eu"].items()]
    return {
        "modules": table(["output of", *heads], lines),
        "eu": table(["prediction", *(f"{what}, {name}" for name in sets for what in ("EU ratio", "rank"))], eu),
    }


def main() -> None:
    """Measure, and make the tables of the page."""
    parser = argparse.ArgumentParser(description="Compare the moments behind each module with members.")
    parser.add_argument("--work", type=Path, help="the folder of ``single_pass`` with its posteriors")
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    subject = classifier()
    label = "diagonal Laplace"
    posterior = kept(parser.parse_args().work, f"classifier, {label}", posteriors(subject)[label])
    path = RESULTS / "single_pass.json"
    path.write_text(as_text(json.loads(path.read_text()) | {"modules": modules(subject, posterior)}))
    render("single_pass")


if __name__ == "__main__":
    main()
