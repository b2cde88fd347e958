"""The held-out quality of a posterior by temperature, for any classifier or language model and any method.

    python -m scripts.reproduce.temperature_sweep --output_dir sweep          the page's run, which has no other flag
    python -m scripts.reproduce.temperature_sweep --output_dir sweep --model_name_or_path FOLDER --dataset train.jsonl \
        --test_file test.jsonl [--task causal_lm] [--batch_size 64] [--prior_std 0.1] [--num_train 500] [--depth 2]

By default the script runs the CNN-LSTM of cold_posteriors app. A.3 on descriptions of Debian packages. A cell is one
method at one temperature and seed. Each cell writes ``output_dir/cells/NAME.json`` and is not run again if it exists.

Methods: ``mle`` and ``map`` (AdamW; no temperature), ``laplace_ef`` and ``laplace_ggn`` (around that MAP; members and
linearised; for a language model with as many draws), ``mean_field``, ``sghmc_serial`` (one chain), ``sghmc_parallel``
(one draw from each of several chains) and ``phases`` (SGD, then SGHMC, then SGD again, section 5.3: the single model
after each). Methods that a model does not allow are left out, with a message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    default_data_collator,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from hf_bayes import (
    BayesianModelForCausalLM,
    BayesianModelForSequenceClassification,
    BayesianTrainer,
    BayesianTrainingArguments,
    LaplaceConfig,
    MAPConfig,
    MeanFieldConfig,
    SGHMCConfig,
    fit_laplace,
)
from hf_bayes.cli.data import load_splits
from hf_bayes.cli.labels import labelled_text
from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.cli.token_windows import token_windows
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.schedules import Cyclical
from hf_bayes.metrics import summarise
from hf_bayes.models.base import BayesianModel
from scripts.reproduce import cnn_lstm, debian_text
from scripts.reproduce.accounts import account, accounts_table
from scripts.reproduce.report import keep, spread, table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAME = "temperature_sweep"
METRICS = ("accuracy", "nll", "brier", "ece")
POINTS = ("mle", "map")
METHODS = (*POINTS, "laplace_ef", "laplace_ggn", "mean_field", "sghmc_serial", "sghmc_parallel", "phases")


@dataclass
class Arguments:
    """The model, data, methods and settings of the sweep."""

    output_dir: str = field(metadata={"help": "Folder of the cells (and of the page's model and data)."})
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A folder or Hub model, every weight random. Default: a new CNN-LSTM."}
    )
    task: str = field(default="sequence_classification", metadata={"help": "Task: this, or causal_lm."})
    dataset: str | None = field(default=None, metadata={"help": "Training file, as for hf_bayes.cli.data.load_splits."})
    test_file: str | None = field(default=None, metadata={"help": "File of test rows. Default: the validation rows."})
    evaluate_on: str = field(default="test", metadata={"help": "test, or validation to choose settings."})
    validation_fraction: float = field(default=0.2, metadata={"help": "Share held out of the training file."})
    text_column: str = field(default="text")
    label_column: str = field(default="label")
    max_length: int = field(default=16, metadata={"help": "Tokens of a padded row, or of a window."})
    num_train: int | None = field(default=1000, metadata={"help": "n, rows to train on. None: all."})
    depth: int | None = field(default=None, metadata={"help": "num_hidden_layers of the model."})
    subspace: str = field(default="all", metadata={"help": "Random parameters."})
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    temperatures: list[float] = field(default_factory=lambda: [1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0])
    phase_temperatures: list[float] = field(default_factory=lambda: [1.0])
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    batch_size: int = field(default=32)
    prior_std: float = field(default=1.0)
    learning_rate: float = field(default=0.1, metadata={"help": "Learning rate of SGHMC and SGD."})
    momentum: float = field(default=0.98, metadata={"help": "Momentum of SGHMC and SGD."})
    preconditioner_batches: int = field(default=16, metadata={"help": "Updates of an estimate of SGHMC's masses."})
    num_steps: int = field(default=800, metadata={"help": "Updates of a chain."})
    burn_in: float = field(default=0.5)
    num_draws: int = field(default=4, metadata={"help": "Draws of the serial chain, one at the end of each cycle."})
    num_chains: int = field(default=4, metadata={"help": "Chains of sghmc_parallel."})
    adam_steps: int = field(default=500, metadata={"help": "Updates of MLE, MAP and mean-field VI."})
    adam_learning_rate: float = field(default=3e-3)
    init_std: float = field(default=0.1, metadata={"help": "Initial std of the mean-field Gaussian."})
    std_learning_rate: float = field(default=0.02)
    laplace_structure: str = field(
        default="low_rank", metadata={"help": "Covariance of Laplace. The CNN-LSTM allows only this one."}
    )
    laplace_rank: int = field(default=64)
    num_members: int = field(default=10, metadata={"help": "Draws of a Gaussian."})


Loaded = BayesianModelForCausalLM | BayesianModelForSequenceClassification


@dataclass
class Problem:
    """The model and data that all cells share."""

    args: Arguments
    model: str
    tokenizer: Any
    train: Dataset
    held_out: Dataset
    names: list[str]
    collate: Callable[..., Any]

    @property
    def causal(self) -> bool:
        return self.args.task == "causal_lm"

    def load(self) -> PreTrainedModel:
        """Return the model that every cell starts from."""
        settings: dict[str, Any] = {} if self.causal else {"num_labels": len(self.names)}
        if self.args.depth is not None:
            settings["num_hidden_layers"] = self.args.depth
        set_seed(0)  # a new head is then equal for all
        kind = AutoModelForCausalLM if self.causal else AutoModelForSequenceClassification
        model = kind.from_pretrained(self.model, **settings)
        model.config.pad_token_id = self.tokenizer.pad_token_id
        return model

    def load_posterior(self, directory: Path, members: int | None = None) -> Loaded:
        kind = BayesianModelForCausalLM if self.causal else BayesianModelForSequenceClassification
        return kind.from_pretrained(directory, members=members, base_model=self.load())


def prepare(args: Arguments) -> Problem:
    """Load the data, or make the data of the page's run."""
    root, model, dataset, test = Path(args.output_dir), args.model_name_or_path, args.dataset, args.test_file
    if dataset is None:
        train_file, test_file = debian_text.write(root / "data")
        dataset, test = str(train_file), str(test_file)
    splits = load_splits(
        dataset,
        validation_file=test if args.evaluate_on == "test" else None,
        validation_fraction=args.validation_fraction,
        text_column=args.text_column,
    )
    if "validation" not in splits:
        raise ValueError(
            f"validation_fraction must lie strictly between 0 and 1 where no other rows are there to evaluate on, got "
            f"{args.validation_fraction}: raise it, or give --test_file and evaluate on that"
        )
    rows = len(splits["train"])
    splits["train"] = splits["train"].shuffle(seed=0).select(range(min(args.num_train or rows, rows)))
    if model is None:
        model = str(root / "model")
        sizes = {} if args.depth is None else {"num_hidden_layers": args.depth}
        num_labels = len(set(splits["train"][args.label_column]))
        cnn_lstm.build(Path(model), splits["train"][args.text_column], num_labels=num_labels, **sizes)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if args.task == "causal_lm":
        windows = {
            name: token_windows(part, tokenizer, length=args.max_length, text_column=args.text_column, join=True)
            for name, part in splits.items()
        }
        collate: Callable[..., Any] = default_data_collator
        return Problem(args, model, tokenizer, windows["train"], windows["validation"], [], collate)
    encoded, head = labelled_text(
        splits, tokenizer, text_column=args.text_column, label_column=args.label_column, max_length=args.max_length
    )
    collate = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=args.max_length)
    names = list(head["id2label"].values())
    return Problem(args, model, tokenizer, encoded["train"], encoded["validation"], names, collate)


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
        of_map = root / f"{_settings_key(problem.args)}-map-{seed}"  # the centre of the Laplace approximations
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


def sweep(args: Arguments) -> dict[str, Any]:
    """Run the missing cells and return the record of all cells."""
    unknown = sorted(set(args.methods) - set(METHODS))
    if unknown:
        raise ValueError(f"unknown methods {', '.join(unknown)}: the methods are {', '.join(METHODS)}")
    if args.evaluate_on not in ("test", "validation"):
        raise ValueError(f"evaluate_on must be test or validation, got {args.evaluate_on!r}")
    problem, cells = prepare(args), Path(args.output_dir) / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    record = []
    for seed, name in itertools.product(args.seeds, _ordered(args.methods)):
        heats = [None] if name in POINTS else args.phase_temperatures if name == "phases" else args.temperatures
        for temperature in heats:
            file = cells / f"{_settings_key(args)}-{name}-{temperature}-{seed}.json"
            if not file.exists():
                start = time.perf_counter()
                found = run_cell(problem, name, temperature, seed)
                cell = {"method": name, "temperature": temperature, "seed": seed, **found}
                file.write_text(json.dumps({**cell, "seconds": round(time.perf_counter() - start, 1)}))
            record.append(json.loads(file.read_text()))
    for line, why in left_out(record):
        print(f"left out: {line}: {why}")
    data = hashlib.sha256(json.dumps(problem.train[:], sort_keys=True).encode()).hexdigest()[:12]
    settings = {k: v for k, v in dataclasses.asdict(args).items() if k != "output_dir"}
    about = {"num_train": len(problem.train), "num_held_out": len(problem.held_out), "names": problem.names}
    about |= {"num_parameters": sum(p.numel() for p in problem.load().parameters()), "sha256_of_train": data}
    return {"settings": settings, "problem": about, "cells": record}


def left_out(cells: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the missing lines and the reasons, once for all temperatures and seeds."""
    return list(dict.fromkeys(found for cell in cells for found in cell.get("left_out", {}).items()))


def _ordered(methods: list[str]) -> list[str]:
    """Return the methods with MAP before the Laplace approximations, which need it."""
    wanted = set(methods) | ({"map"} if any(name.startswith("laplace") for name in methods) else set())
    return [name for name in METHODS if name in wanted]


def _settings_key(args: Arguments) -> str:
    """Return a key of all settings except the looped ones: other settings have other cells."""
    loops = ("output_dir", "methods", "temperatures", "phase_temperatures", "seeds")
    fixed = {k: v for k, v in dataclasses.asdict(args).items() if k not in loops}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:8]


# -- the page ------------------------------------------------------------------------------------------------------


def lines_of(record: dict[str, Any]) -> dict[str, dict[float | None, dict[str, list[float]]]]:
    """Return {line: {T: {metric: [one value per seed]}}}."""
    found: dict[str, dict[float | None, dict[str, list[float]]]] = {}
    for cell in record["cells"]:
        for line, metrics in cell["lines"].items():
            at = found.setdefault(line, {}).setdefault(cell["temperature"], {name: [] for name in METRICS})
            for name in METRICS:
                at[name].append(metrics[name])
    return found


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    lines, rows, best = lines_of(record), [], []
    for line, at in lines.items():
        for temperature, metrics in at.items():
            heat = "" if temperature is None else f"{temperature:g}"
            rows.append([line, heat, *(spread(metrics[name]) for name in METRICS)])
        heats = [heat for heat in at if heat is not None]
        if len(heats) > 1:
            least = {heat: float(np.mean(at[heat]["nll"])) for heat in heats}
            coldest = min(least, key=least.__getitem__)
            most = max(heats, key=lambda heat: float(np.mean(at[heat]["accuracy"])))
            hottest = max(heats)
            best.append([line, f"{coldest:g}", least[coldest], f"{hottest:g}", least[hottest], f"{most:g}"])
    seconds: dict[str, list[float]] = {}
    for cell in record["cells"]:
        seconds.setdefault(cell["method"], []).append(cell["seconds"])
    accounts: dict[str, list[dict[str, Any]]] = {}
    for cell in record["cells"]:
        if "diagnostics" in cell:
            accounts.setdefault(f"{cell['method']}, T = {cell['temperature']:g}", []).append(cell["diagnostics"])
    cost = table(["method", "seconds of a cell"], ([name, f"{np.mean(each):.0f}"] for name, each in seconds.items()))
    head = ["method", "T of the least NLL", "NLL there", "largest T", "NLL there", "T of the best accuracy"]
    return {
        "best": table(head, best),
        "sweep": table(["method", "T", "accuracy", "NLL", "Brier", "ECE"], rows),
        "diagnostics": accounts_table(accounts),
        "cost": cost,
    }


def figures(record: dict[str, Any], directory: Path) -> None:
    """Draw a panel for each metric, with a line over T and a band of one standard deviation for each method.

    Point estimates are horizontal lines.
    """
    lines = lines_of(record)
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    labels = {"accuracy": "accuracy (higher is better)", "nll": "NLL (nats)", "brier": "Brier score", "ece": "ECE"}
    swept = [line for line in lines if len(lines[line]) > 1]
    for axis, metric in zip(axes.flat, METRICS, strict=True):
        for index, line in enumerate(swept):
            heats = sorted(heat for heat in lines[line] if heat is not None)
            values = np.array([lines[line][heat][metric] for heat in heats])
            mean, std = values.mean(1), values.std(1, ddof=min(1, values.shape[1] - 1))
            dashes = "--" if line.endswith("linearised") else "-"
            axis.plot(heats, mean, f"o{dashes}", color=f"C{index}", ms=4, label=line.replace("_", " "))
            axis.fill_between(heats, mean - std, mean + std, color=f"C{index}", alpha=0.15, lw=0)
        for line, dashes in zip(POINTS, (":", "-."), strict=True):
            if line in lines:
                axis.axhline(np.mean(lines[line][None][metric]), color="0.3", lw=1.2, ls=dashes, label=line.upper())
        axis.set(xscale="log", xlabel="temperature T", ylabel=labels[metric])
    low, high = axes[0, 1].get_ylim()
    if high > 5 * low > 0:  # members of wide Gaussians are worse than a uniform guess
        axes[0, 1].set_yscale("log")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(directory / f"{NAME}.png", dpi=130)
    plt.close(figure)


def quiet() -> None:
    """Silence progress bars and logs, because a hundred runs would print too much."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*(at temperature 0|1 member).*")


def main() -> None:
    """Make the page's run, or the record and figure of other settings in their own folder."""
    (args,) = parse_arguments(Arguments)
    quiet()
    if args == Arguments(args.output_dir):
        return keep(NAME, lambda: sweep(args))
    directory = Path(args.output_dir)
    record = sweep(args)
    (directory / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    figures(record, directory)
    print(blocks(record)["sweep"])
    return None


if __name__ == "__main__":
    main()
