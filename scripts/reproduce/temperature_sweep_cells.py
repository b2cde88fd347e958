"""A cell of ``temperature_sweep``: one method at one temperature and seed, trained and scored."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from hf_bayes import (
    BayesianTrainer,
    BayesianTrainingArguments,
    LaplaceConfig,
    MAPConfig,
    MeanFieldConfig,
    SGHMCConfig,
    fit_laplace,
)
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.schedules import Cyclical
from hf_bayes.metrics import summarise
from hf_bayes.models.base import BayesianModel
from scripts.reproduce.accounts import account
from scripts.reproduce.temperature_sweep_problem import METHODS, Arguments, Problem, settings_key


def method_of(args: Arguments, name: str, temperature: float) -> MethodConfig:
    """Return the config of a method at a temperature."""
    prior = {"prior_std": args.prior_std}
    chain = {
        **prior,
        **{"momentum": args.momentum, "temperature": temperature, "burn_in": args.burn_in},
        **{"schedule": Cyclical(), "preconditioner": "layerwise"},
        "preconditioner_batches": args.preconditioner_batches,
    }
    if name == "mle":
        return MAPConfig(temper="likelihood", **prior)
    if name == "map":
        return MAPConfig(**prior)
    if name == "mean_field":
        rates = {"num_draws": 1, "init_std": args.init_std, "std_learning_rate": args.std_learning_rate}
        return MeanFieldConfig(temperature=temperature, **prior, **rates)
    if name.startswith("laplace"):
        estimator = {"laplace_ef": "ef_sequence", "laplace_ggn": "ggn"}[name]
        shape = {"structure": args.laplace_structure, "rank": args.laplace_rank}
        return LaplaceConfig(temperature=temperature, estimator=estimator, **shape, **prior)
    if name == "sghmc_serial":
        return SGHMCConfig(num_chains=1, draws_per_chain=args.num_draws, **chain)
    if name == "sghmc_parallel":
        # thin: the cycles are as long as in the serial chain
        thin = int(args.num_steps * (1 - args.burn_in)) // args.num_draws
        return SGHMCConfig(num_chains=args.num_chains, draws_per_chain=1, thin=thin, **chain)
    raise ValueError(f"unknown method {name!r}: the methods are {', '.join(METHODS)}")


def train(problem: Problem, method: MethodConfig, seed: int, directory: Path, model: PreTrainedModel) -> dict[str, Any]:
    """Run a method, save its posterior, and return the diagnostics of the run."""
    trainer = trainer_of(problem, method, seed, directory, model)
    trainer.train()
    trainer.save_model()
    trainer.bayesian.detach()
    return account(trainer.posterior.config.diagnostics)


def trainer_of(
    problem: Problem, method: MethodConfig, seed: int, directory: Path, model: PreTrainedModel
) -> BayesianTrainer:
    """Return the trainer of a method."""
    args = problem.args
    adam = method.name in ("map", "mean_field")
    return BayesianTrainer(
        model=model,
        method=method,
        args=BayesianTrainingArguments(
            output_dir=str(directory),
            learning_rate=args.adam_learning_rate if adam else args.learning_rate,
            lr_scheduler_type="linear" if adam else "constant",
            max_steps=args.adam_steps if adam else args.num_steps,
            per_device_train_batch_size=args.batch_size,
            members_per_pass=method.num_chains,
            map_updates=0,
            seed=seed,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        subspace=args.subspace,
        train_dataset=problem.train,
        data_collator=problem.collate,
        processing_class=problem.tokenizer,
    )


@torch.no_grad()
def score(problem: Problem, model: BayesianModel) -> dict[str, float]:
    """Return means over the held-out likelihood terms."""
    found: list[dict[str, torch.Tensor]] = []
    for batch in _batches(problem, problem.held_out, 256):
        found.append(model.evaluate_batch(batch)[0])
    names = found[0].keys() - {"member_log_lik"}  # it has a column for each member
    joined = {name: np.concatenate([part[name].float().numpy() for part in found]) for name in names}
    return {name: float(value) for name, value in summarise(joined).items()}


def _batches(problem: Problem, rows: Dataset, size: int) -> Iterator[dict[str, Any]]:
    for start in range(0, len(rows), size):
        yield dict(problem.collate([rows[i] for i in range(start, min(start + size, len(rows)))]))


def run_cell(problem: Problem, name: str, temperature: float | None, seed: int) -> dict[str, Any]:
    """Return the content of a cell: ``lines``, {label: metrics}; for a sampler also ``diagnostics``; and
    for missing labels ``left_out``, {label: reason}."""
    root = Path(problem.args.output_dir)
    if name == "phases":
        assert temperature is not None
        return {"lines": _phases(problem, temperature, seed)}
    with tempfile.TemporaryDirectory() as scratch:
        of_map = root / f"{settings_key(problem.args)}-map-{seed}"  # the centre of the Laplace approximations
        directory = of_map if name == "map" else Path(scratch)
        method = method_of(problem.args, name, temperature or 0.0)
        if not name.startswith("laplace"):
            said = train(problem, method, seed, directory, problem.load())
            lines = {name: score(problem, problem.load_posterior(directory, _members(problem, method)))}
            return {"lines": lines, **({"diagnostics": said} if name.startswith("sghmc") else {})}
        around = problem.load_posterior(of_map)
        options = {"collate": problem.collate, "batch_size": 64, "tokenizer": problem.tokenizer, "seed": seed}
        fit_laplace(around, problem.train, method, **options).save_pretrained(directory)
        around.detach()
        model = problem.load_posterior(directory, problem.args.num_members).linearise(None)
        lines, linearised = {name: score(problem, model)}, f"{name}_linearised"
        try:
            model.linearise()
        except ValueError as error:  # the model has an operation without forward-mode derivative
            return {"lines": lines, "left_out": {linearised: str(error)}}
        return {"lines": {**lines, linearised: score(problem, model)}}


def _members(problem: Problem, method: MethodConfig) -> int | None:
    return problem.args.num_members if method.name == "mean_field" else None


def _phases(problem: Problem, temperature: float, seed: int) -> dict[str, dict[str, float]]:
    """Run SGD, SGHMC and SGD, each from the end of the one before, and return the last model of each."""
    args, model, lines = problem.args, problem.load(), {}
    for phase, heat in enumerate((0.0, temperature, 0.0)):
        method: MethodConfig = SGHMCConfig(
            num_chains=1, temperature=0.0, momentum=args.momentum, prior_std=args.prior_std, init_jitter=0.0
        )
        if heat > 0:
            method = dataclasses.replace(method_of(args, "sghmc_parallel", heat), num_chains=1, init_jitter=0.0)
        with tempfile.TemporaryDirectory() as scratch:
            train(problem, method, seed, Path(scratch), model)
            bayesian = problem.load_posterior(Path(scratch))
        lines[f"phase_{phase + 1}_{'sghmc' if heat else 'sgd'}"] = score(problem, bayesian)
        values = bayesian.layout.unflatten(bayesian.current.detach()[0])
        bayesian.detach()
        model = problem.load()
        model.load_state_dict(values, strict=False)
    return lines
