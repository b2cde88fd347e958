"""The runs of ``double_pendulum``: train a method, load its posterior as a user does, and score it."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes import BayesianModelForSequenceClassification, BayesianTrainer, BayesianTrainingArguments
from hf_bayes.core.config import MethodConfig
from hf_bayes.diagnostics.convergence import rhat
from hf_bayes.methods.mcmc.penalty import PenaltyConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.metrics import average_coverage_error
from scripts.reproduce.double_pendulum_contenders import LIKELIHOOD, PRIOR_STD, Contender, network
from scripts.reproduce.double_pendulum_data import Rows


@dataclass(frozen=True)
class Settings:
    """Sizes of a run.

    Attributes:
        num_rows, num_train: rows of the simulation.
        updates: updates of the random walks. The first half is burn-in, in which the step size adapts.
        training: updates of AdamW before sampling.
        num_chains, num_draws: chains and draws of each line and seed.
        size, count: rows of a batch, and batches.
        sizes: rows of a batch in Figure 3. The number of batches is the number that the data fill.
        stretch: test rows in Figure 2.
    """

    num_rows: int = 9975
    num_train: int = 2992
    updates: int = 8000
    training: int = 2000
    num_chains: int = 4
    num_draws: int = 10
    size: int = 60
    count: int = 100
    sizes: tuple[int, ...] = (20, 60, 200)
    num_seeds: int = 3
    stretch: tuple[int, int] = (1000, 1300)


def train(
    method: MethodConfig, start: Tensor, rows: Rows, *, steps: int, rate: float, seed: int,
    weight: float | None = None, size: int | None = None, count: int = 1,
) -> BayesianTrainer:  # fmt: skip
    """Return a trainer whose chains have made ``steps`` updates from ``start`` [M, 419].

    Args:
        rate: the learning rate. Of random walks and leapfrog steps, the first step size.
        weight: N, the weight of the likelihood in rows; None for all rows. 2992 is the Bayes posterior. The rows of one
            batch are the paper's target, in which the likelihood of a batch counts once.
        size, count: rows of a batch, and batches of an update; None for all rows in one batch.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = BayesianTrainingArguments(
            folder, max_steps=steps, learning_rate=rate, seed=seed, num_data=weight, minibatch="shared",
            per_device_train_batch_size=size or len(rows.y), gradient_accumulation_steps=count, probe_steps=0,
            members_per_pass=len(start), map_updates=0, use_cpu=True, report_to="none", disable_tqdm=True,
            save_strategy="no", logging_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = BayesianTrainer(
            network(), dataclasses.replace(method, num_chains=len(start)), args, subspace="all",
            train_dataset=rows.as_dicts(), likelihood=LIKELIHOOD,
        )  # fmt: skip
        trainer.bayesian.place(start)
        trainer.train()
    return trainer


def saved_and_loaded(trainer: BayesianTrainer) -> BayesianModelForSequenceClassification:
    """Return the model that a user loads from the posterior's directory."""
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_model(folder)
        return BayesianModelForSequenceClassification.from_pretrained(folder, base_model=network())


@torch.no_grad()
def scores(model: BayesianModelForSequenceClassification, num_chains: int, train: Rows, test: Rows) -> dict[str, Any]:
    """Return Table 1's columns for a posterior, and R-hat of the training data's likelihood."""
    tested = model(input_values=test.x, labels=test.y)  # eqs 19 and 21: the mixture of all members
    covered = ((test.y - tested.logits).abs() <= tested.predictive_std).float().mean(1)
    outputs = model.member_logits({"input_values": train.x})
    log_probs = LIKELIHOOD.log_prob(outputs.double(), train.y.double())
    levels = -log_probs.mean(1).view(num_chains, -1)
    quarter = max(1, levels.shape[1] // 4)
    return {
        "test": float(tested.loss),
        "train": float(model(input_values=train.x, labels=train.y).loss),
        "ace": average_coverage_error(covered.numpy()),
        "coverage": float(covered.mean()),
        "first": float(levels[:, :quarter].mean()),
        "last": float(levels[:, -quarter:].mean()),
        **({"rhat": float(rhat(levels[..., None]))} if levels.shape[1] >= 4 else {}),
    }


class LineResult(NamedTuple):
    """The model that a line predicts with, and the line's numbers."""

    model: BayesianModelForSequenceClassification
    numbers: dict[str, Any]


def run_line(
    line: Contender, start: Tensor, rows: tuple[Rows, Rows], settings: Settings, seed: int, *,
    size: int, count: int, rate: float,
) -> LineResult:  # fmt: skip
    """Run a line of the table, and score its posterior; ``rows`` are for training and for the test."""
    steps = max(2 * settings.num_draws, round(line.updates * settings.updates))
    method = dataclasses.replace(line.method, draws_per_chain=settings.num_draws)
    weight = None if line.full else size
    if isinstance(method, SGLDConfig):  # the paper's step eta multiplies the gradient of U, and not of U / N
        count, rate = 1, rate * (weight or len(rows[0].y))
    batches: dict[str, Any] = {} if method.requirements.all_data_in_every_update else {"size": size, "count": count}
    begin = time.process_time()
    trainer = train(method, start, rows[0], steps=steps, rate=rate, seed=seed, weight=weight, **batches)
    seconds = time.process_time() - begin
    told = {name: float(values.mean()) for name, values in trainer.monitor.mean_info().items()}
    names = ("acceptance", "step_size", "penalty", "beyond_series")
    kept = {name: told[name] for name in names if name in told}
    kept["moved"] = float((trainer.run.theta - start).square().mean().sqrt())
    model = saved_and_loaded(trainer)
    return LineResult(model, {**scores(model, len(start), *rows), **kept, "updates": steps, "seconds": seconds})


def run_stable(line: Contender, start: Tensor, rows: tuple[Rows, Rows], settings: Settings, seed: int) -> LineResult:
    """Run a line at the paper's sizes. SGLD runs at the paper's eta, divided by 10 until it does not diverge."""
    for rate in (1e-5, 1e-6, 1e-7, 1e-8) if isinstance(line.method, SGLDConfig) else (1e-4,):
        try:
            found = run_line(line, start, rows, settings, seed, size=settings.size, count=settings.count, rate=rate)
        except FloatingPointError:
            continue
        return found._replace(numbers={**found.numbers, "rate": rate})
    raise RuntimeError("pseudo-SGLD diverges even at eta = 1e-8")


def run_size(
    start: Tensor, rows: tuple[Rows, Rows], settings: Settings, seed: int, size: int, step: float
) -> dict[str, Any]:
    """Run a point of Figure 3: one step size for all, and as many batches as the data fill."""
    method = PenaltyConfig(step_size=step, target_acceptance=None, prior_std=PRIOR_STD)
    count = len(rows[0].y) // size
    line = Contender(method, updates=0.5)
    found = run_line(line, start, rows, settings, seed, size=size, count=count, rate=step)
    return {"size": size, "count": count, **found.numbers}
