"""The reference gradient of all data, and parts of trainer runs that several tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from hf_bayes import BayesianModelForCausalLM
from hf_bayes.core.types import Evaluation
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs

METRICS = ("nll", "accuracy", "ece", "brier", "total", "aleatoric", "epistemic", "member_nll")


class Still(NamedTuple):
    theta: Tensor
    step: Tensor


def full_data(build: Any, trainer: BayesianTrainer, rows: list[dict]) -> Evaluation:
    """Log-likelihood of all rows and its gradient for every chain, by a plain model for each."""
    layout, values, grads = trainer.bayesian.layout, [], []
    for theta in runs.origin(trainer):
        model = build()
        parameters = dict(model.named_parameters())
        for name, value in layout.unflatten(theta).items():
            parameters[name].data.copy_(value)
        total = torch.zeros((), dtype=theta.dtype)
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            logits = model(input_ids=ids).logits[0, :-1]
            total = total + logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).sum()
        found = torch.autograd.grad(total, [parameters[name] for name in layout.names])
        values.append(total.detach())
        grads.append(layout.flatten(dict(zip(layout.names, found, strict=True))))
    return Evaluation(torch.stack(values), torch.stack(grads))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def require_loaded_and_resumed(whole: BayesianTrainer, run: Callable[..., BayesianTrainer], folder: Path) -> None:
    """Check that the language model of a run in ``folder``/whole is loaded as it was, and that the run is resumed."""
    whole.save_model(str(folder / "posterior"))
    ids = torch.arange(3, 12)[None]
    loaded = BayesianModelForCausalLM.from_pretrained(folder / "posterior")
    assert torch.equal(loaded(ids).logits, whole.bayesian(ids).logits)
    resumed = run("resumed", resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    assert runs.equal(resumed.posterior.approximation, whole.posterior.approximation)


class Stream(IterableDataset):
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self.rows


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step, self.seen = step, []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(kwargs["optimizer"].param_groups[0]["lr"])
        control.should_training_stop |= state.global_step >= self.step
