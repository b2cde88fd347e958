"""The cells of ``single_pass_table``: a task, a posterior and a seed; its predictions.

This module is not a command: ``single_pass_table`` imports it.
"""

from __future__ import annotations

import functools
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import default_data_collator, set_seed

from hf_bayes import (
    BayesianModelForSequenceClassification,
    BayesianTrainer,
    BayesianTrainingArguments,
    LaplaceConfig,
    MeanFieldConfig,
    Posterior,
    SWAGConfig,
    distil,
    fit_laplace,
    fit_layer_factors,
    fit_variance_factor,
)
from hf_bayes.models.calibrating import calibration_of
from scripts.reproduce.recommend_tasks import Task
from scripts.reproduce.single_pass_ranks import Group, epistemic
from scripts.reproduce.single_pass_subjects import kept
from scripts.reproduce.single_pass_table_scores import Found

LAPLACE = {"K-FAC Laplace": "kronecker", "diagonal Laplace": "diagonal"}
TRAINED = {"SWAG": SWAGConfig, "mean field": MeanFieldConfig}
KINDS = (*LAPLACE, *TRAINED)

STEPS, RATE, BATCH = 200, 3e-3, 32
"""The updates, the learning rate and the rows of a minibatch of a training."""

LONG = {"clinc, 800 updates": 800, "debian, 800 updates": 800}
"""Tasks with another number of updates: 150 intents are not learned in 200, and 800 overfit eight sections."""

PRIOR_ROWS = 200
"""The number of held-out rows from which a prior is chosen. The other held-out rows fit temperatures and factors."""

OTHERS = 300
"""The largest number of rows of another set."""

MEMBERS = 8, 24
"""The numbers of members of two groups; both together are the 32 members."""

Rows = list[dict[str, Any]]
Batches = list[dict[str, Tensor]]


@dataclass
class Cell:
    """A posterior of a task and a seed, and the rows that it is tested on.

    Attributes:
        task: the model and its rows.
        kind: the name of the posterior.
        seed: of training, of the draws and of the members.
        work: a folder that keeps posteriors for later calls; None keeps none.
        name: the task, the posterior and the seed, with commas; the name of the posterior in ``work``.
        first: the cell of the first seed, whose prior a Laplace approximation takes; None chooses a prior.
    """

    task: Task
    kind: str
    seed: int
    work: Path | None
    name: str
    first: Cell | None = None
    sets: dict[str, Batches] = field(init=False)

    def __post_init__(self) -> None:
        others = {name: list(rows)[:: -(-len(rows) // OTHERS)] for name, rows in self.task.others.items()}
        self.sets = {name: batches(rows) for name, rows in {"test": list(self.task.sets["test"]), **others}.items()}
        heldout: Rows = list(self.task.sets["heldout"])
        self.prior_rows, self.calibration_rows = heldout[:PRIOR_ROWS], heldout[PRIOR_ROWS:]

    @property
    def updates(self) -> int:
        """The number of updates of the training."""
        return LONG.get(self.name.rsplit(", ", 2)[0], STEPS)

    @property
    def labels(self) -> Tensor:
        """The labels [n] of the test rows."""
        return torch.cat([batch["labels"] for batch in self.sets["test"]])

    def base(self) -> Any:
        """Return the encoder without LoRA."""
        return self.task.model(0).unload().eval()

    @functools.cached_property
    def posterior(self) -> Posterior:
        """The posterior."""
        with torch.enable_grad():  # predictions are made without gradients
            return kept(self.work, self.name, self._laplace if self.kind in LAPLACE else self._trained)

    def load(self, posterior: Posterior, **options: Any) -> Any:
        """Return the model of a posterior."""
        set_seed(self.seed)
        return BayesianModelForSequenceClassification.from_pretrained(
            posterior, base_model=self.base(), check_base=False, **options
        )

    def _laplace(self) -> Posterior:
        train: Rows = list(self.task.sets["train"])
        model = fine_tuned(self.task.model(self.seed), train, self.seed, self.updates)
        options: dict[str, Any] = {"fit_prior": "heldout"}
        if self.first is not None:
            options = {"prior_std": fitted_prior(self.first.posterior)}
        return fit_laplace(
            model, train, LaplaceConfig(structure=LAPLACE[self.kind], check_gradient=False, **options),
            collate=shortest, batch_size=BATCH, seed=self.seed,
            heldout=self.prior_rows[::2] if self.first is None else None,
        )  # fmt: skip

    def _trained(self) -> Posterior:
        prior = {"lora_": 0.1, "classifier": 1.0}
        with tempfile.TemporaryDirectory() as directory:
            trainer = BayesianTrainer(
                model=self.task.model(self.seed),
                method=TRAINED[self.kind](num_chains=1, prior_std=prior),
                args=BayesianTrainingArguments(
                    output_dir=directory, learning_rate=RATE, max_steps=self.updates, per_device_train_batch_size=BATCH,
                    map_updates=0, use_cpu=True, disable_tqdm=True, report_to="none", logging_strategy="no",
                    save_strategy="no", trunk_memory_gib=1.0, seed=self.seed,
                ),
                train_dataset=Dataset.from_list(list(self.task.sets["train"])),
                data_collator=default_data_collator,
            )  # fmt: skip
            trainer.train()
            return trainer.posterior


def fitted_prior(posterior: Posterior) -> dict[str, float]:
    """Return the standard deviation of the fitted prior of a Laplace approximation for each parameter, by its name."""
    names = [re.escape(str(name)) for name, _ in posterior.config.parameters]
    found = posterior.config.diagnostics["laplace"][0]["prior_precision"]
    # the report has one number if all parameters have the same precision, as they have at the bound of the search
    precisions = found if isinstance(found, list) else [found] * len(names)
    return {name: value**-0.5 for name, value in zip(names, precisions, strict=True)}


def fine_tuned(model: Any, rows: Rows, seed: int, updates: int) -> Any:
    """Return the model after training by AdamW, with a learning rate that falls to 0."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)
    order = torch.Generator().manual_seed(seed)
    chosen = torch.cat([torch.randperm(len(rows), generator=order) for _ in range(-(-updates * BATCH // len(rows)))])
    for index in chosen[: updates * BATCH].split(BATCH):
        loss = model(**shortest([rows[number] for number in index.tolist()])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def shortest(rows: Rows) -> dict[str, Tensor]:
    """Return rows as a batch, without the columns that are padding in all of them."""
    batch: dict[str, Tensor] = default_data_collator(rows)
    length = int(batch["attention_mask"].sum(1).max())
    return {name: value[:, :length] if value.ndim == 2 else value for name, value in batch.items()}


def batches(rows: Rows, size: int = 50) -> Batches:
    """Return rows in batches of rows with about the same length."""
    ordered = sorted(rows, key=lambda row: sum(row["attention_mask"]))
    return [shortest(ordered[start : start + size]) for start in range(0, len(ordered), size)]


# -- predictions ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def read(model: Any, sets: Mapping[str, Batches]) -> dict[str, Found]:
    """Return the predictions of a model for each set."""
    found = {}
    for name, rows in sets.items():
        outputs = [model(**_inputs(batch)) for batch in rows]
        found[name] = Found(*(torch.cat([getattr(out, key) for out in outputs]) for key in ("logits", "epistemic")))
    return found


def mean_network(cell: Cell) -> dict[str, dict[str, Found]]:
    """Return the predictions of the mean of the posterior, as they are and with a temperature."""
    model = cell.load(cell.posterior, members=1)
    approximation: Any = cell.posterior.approximation
    model.linearise(None).show(approximation.means.to(model.theta))
    return with_temperature("mean network", model, cell)


def with_temperature(name: str, model: Any, cell: Cell) -> dict[str, dict[str, Found]]:
    """Return the predictions of a model, as they are and with a temperature of held-out rows. The model is detached."""
    found = read(model, cell.sets)
    temperature = calibration_of(model, batches(cell.calibration_rows)).temperature
    model.detach()
    scaled = {key: one._replace(log_probs=(one.log_probs / temperature).log_softmax(-1)) for key, one in found.items()}
    return {name: found, f"{name}, temperature": scaled}


@torch.no_grad()
def members(cell: Cell) -> dict[str, dict[str, Found]]:
    """Return the predictions of 8 and of 32 members."""
    model = cell.load(cell.posterior, members=sum(MEMBERS), prediction="members")
    groups: dict[str, list[Group]] = {name: [] for name in cell.sets}
    for theta in model.theta.detach().clone().split(MEMBERS):
        model.show(theta)
        for name, rows in cell.sets.items():
            outputs = [model(**_inputs(batch)) for batch in rows]
            pair = (torch.cat([getattr(out, key) for out in outputs]) for key in ("logits", "aleatoric"))
            groups[name].append(Group(len(theta), *pair))
    model.detach()
    return {
        "8 members": {name: mixture(both[:1]) for name, both in groups.items()},
        "32 members": {name: mixture(both) for name, both in groups.items()},
    }


def mixture(groups: Sequence[Group]) -> Found:
    """Return the prediction of all members of groups together."""
    total = sum(group.count for group in groups)
    probs: Any = sum(group.count / total * group.log_probs.double().exp() for group in groups)
    return Found(probs.log(), epistemic(groups))


def single_pass(cell: Cell) -> dict[str, dict[str, Found]]:
    """Return the predictions of the default single pass, as they are and with a temperature."""
    model = cell.load(cell.posterior, members=1)
    model.single_pass()
    return with_temperature("single pass", model, cell)


def with_factors(cell: Cell, posterior: Posterior) -> dict[str, Found]:
    """Return the predictions of the default single pass of a posterior with factors of its variances."""
    model = cell.load(posterior, members=1)
    model.single_pass()
    found = read(model, cell.sets)
    model.detach()
    return found


def one_factor(cell: Cell) -> dict[str, Found]:
    """Return the predictions of a single pass with one factor of its variances."""
    return with_factors(cell, fit_variance_factor(cell.posterior, cell.calibration_rows, **_options(cell)))


def layer_factors(cell: Cell) -> dict[str, Found]:
    """Return the predictions of a single pass with a factor for each layer."""
    return with_factors(cell, fit_layer_factors(cell.posterior, cell.calibration_rows, **_options(cell)))


def student(cell: Cell) -> dict[str, Found]:
    """Return the predictions of a distilled student of 32 members, from training rows and held-out rows."""
    rows = [{k: v for k, v in row.items() if k != "labels"} for row in [*cell.task.sets["train"], *cell.prior_rows]]
    posterior = distil(cell.posterior, rows, members=sum(MEMBERS), progress=False, **_options(cell))
    model = cell.load(posterior, prediction="distilled")
    found = read(model, cell.sets)
    model.detach()
    return found


WAYS: dict[tuple[str, ...], Callable[[Cell], dict[str, dict[str, Found]]]] = {
    ("mean network", "mean network, temperature"): mean_network,
    ("8 members", "32 members"): members,
    ("single pass", "single pass, temperature"): single_pass,
    ("single pass, one factor",): lambda cell: {"single pass, one factor": one_factor(cell)},
    ("single pass, layer factors",): lambda cell: {"single pass, layer factors": layer_factors(cell)},
    ("student",): lambda cell: {"student": student(cell)},
}
"""The names of predictions -> the function that makes them."""


@torch.no_grad()
def costs(cell: Cell, repeats: int = 5) -> dict[str, float]:
    """Return the median processor time of a batch over the median of the encoder without LoRA, which take turns."""
    plain, batch = cell.base(), _inputs(cell.sets["test"][len(cell.sets["test"]) // 2])
    model = cell.load(cell.posterior, members=sum(MEMBERS), prediction="members")
    theta = model.theta.detach().clone()
    ways = {
        "mean network": lambda: model.linearise(None).show(theta[:1]),
        "8 members": lambda: model.linearise(None).show(theta[: MEMBERS[0]]),
        "32 members": lambda: model.linearise(None).show(theta),
        "single pass": lambda: model.single_pass(),
    }
    times: dict[str, list[float]] = {name: [] for name in ("plain", *ways)}
    for turn in range(repeats + 1):
        for name in times:
            call = model if name in ways else plain
            if name in ways:
                ways[name]()
            begin = time.process_time()
            call(**batch)
            if turn:  # the first turn warms up
                times[name].append(time.process_time() - begin)
    model.detach()
    medians = {name: statistics.median(own) for name, own in times.items()}
    return {name: round(medians[name] / medians["plain"], 2) for name in ways}


def _inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def _options(cell: Cell) -> dict[str, Any]:
    return {"collate": shortest, "batch_size": BATCH, "base_model": cell.base()}
