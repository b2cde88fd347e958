"""A table that says which method suits which task: the candidates of ``tune``, at equal numbers of gradients.

    python -m scripts.reproduce.recommend --data DATA          # the runs that docs/results/recommend.json lacks
    python -m scripts.reproduce.recommend --data DATA --tasks clinc --seeds 1 --minutes 60

The pretrained encoder has LoRA in the attention of all its layers, or of the last one, where runs are five times as
fast. No setting is chosen by hand: learning rates, step
sizes and priors are automatic, and every method has a temperature of its mixture, fitted on validation rows. Each of
four chains has the same number of gradients. Plain fine-tuning has one chain, so it has a quarter of them; a row of its
own shows what one chain with all of them gives.
Every finished run is kept, and a later call makes the missing ones.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import default_data_collator

from hf_bayes import (
    BayesianTrainer,
    BayesianTrainingArguments,
    IVONConfig,
    LowRankVIConfig,
    MAPConfig,
    SGHMCConfig,
    attach,
)
from hf_bayes.cli.evaluation.case import evaluate
from hf_bayes.core.config import MODE_PRIOR_SCALE
from hf_bayes.metrics.evaluation import evaluation_results, row_means
from hf_bayes.models.calibrating import predicting_as_loaded
from hf_bayes.training.tuning.candidates import PLAIN, Candidate, default_candidates
from scripts.reproduce.recommend_tasks import LAST, Task, clinc, debian, shakespeare, tags
from scripts.reproduce.report import as_text, continued, paired_difference, spread, table

NAME = "recommend"
CHAINS, DRAWS = 4, 4
"""Chains of a run, and draws of a sampler's chain."""
# num_draws=1: at 300 gradients, 150 updates of pairs raise the NLL of low-rank VI by .071 +- .010 nats on CLINC150, and
# lower it by .012 +- .004 on Debian sections (last layer, one seed). For mean-field VI see ``default_candidates``
RIVALS = ("SGHMC, ladder", "deep ensemble")
LONG, LONGER = 4, ", 4 times the updates"
"""A name with this end has so many times the updates. One chain of plain fine-tuning then has the gradients of four."""
NEW = (
    Candidate("fine-tuning" + LONGER, MAPConfig(), None, 1),
    Candidate("IVON", IVONConfig(num_chains=CHAINS), None, 10),
    Candidate(
        "SGHMC, T = 0.1, wide prior",
        SGHMCConfig(num_chains=CHAINS, draws_per_chain=DRAWS, temperature=0.1, prior_scale=MODE_PRIOR_SCALE),
        None,
        CHAINS * DRAWS,
    ),
    Candidate("low-rank VI", LowRankVIConfig(num_chains=CHAINS, num_draws=1), None, 10),
)
"""Rows of the table that ``tune`` does not try by itself."""


@dataclass
class Arguments:
    """The part of the table to make."""

    data: str = field(metadata={"help": "Folder with clinc150/data_full.json and tinyshakespeare/input.txt."})
    tasks: list[str] = field(default_factory=lambda: ["clinc_last", "debian_last"], metadata={"help": "Their names."})
    base: str = field(default="recommend-base", metadata={"help": "Folder of the language model, made if missing."})
    seeds: int = field(default=3, metadata={"help": "Number of seeds."})
    minutes: float = field(default=math.inf, metadata={"help": "No run begins after this time."})
    methods: list[str] = field(default_factory=list, metadata={"help": "Rows of the table. Default: all."})
    gpu: bool = field(default=False, metadata={"help": "Train on a GPU. The table then has no processor time."})


def tasks(args: Arguments) -> dict[str, Callable[[], Task]]:
    """Return name -> function that makes a task."""
    data = Path(args.data)
    return {
        "clinc": lambda: clinc(data),
        "clinc_last": lambda: clinc(data, LAST),
        "clinc50_last": lambda: clinc(data, LAST, per_intent=50),
        "debian_last": lambda: debian(data, LAST),
        "debian": lambda: debian(data),
        "tags": lambda: tags(data),
        "tags_last": lambda: tags(data, LAST),
        "shakespeare": lambda: shakespeare(data, Path(args.base)),
    }


class Bench:
    """A task, and a run of a candidate on it, on a GPU or on the CPU."""

    def __init__(self, task: Task, gpu: bool = False) -> None:
        self.task = task
        self.gpu = gpu

    def candidates(self) -> Sequence[Candidate]:
        """Return the rows of the table."""
        with attach(self.task.model(0)) as bayesian:
            found = default_candidates(bayesian, num_chains=CHAINS)
        longer = (each._replace(name=each.name + LONGER) for each in found if each.name in RIVALS)
        return (*found, *NEW, *longer)

    def run(self, candidate: Candidate, seed: int, gradients: int) -> dict[str, Any]:
        """Train with so many gradients of each chain, and return the figures of the test rows."""
        updates = int(gradients // candidate.method.requirements.gradients_per_update)
        with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = BayesianTrainer(
                model=self.task.model(seed),
                method=candidate.method,
                args=BayesianTrainingArguments(
                    output_dir=directory, seed=seed, learning_rate=candidate.learning_rate, max_steps=updates,
                    per_device_train_batch_size=self.task.batch, per_device_eval_batch_size=100, minibatch="shared",
                    trunk_memory_gib=2, map_updates=0, use_cpu=not self.gpu, disable_tqdm=True, report_to="none",
                    logging_strategy="no", save_strategy="no",
                ),
                train_dataset=self.task.sets["train"], eval_dataset=self.task.sets["heldout"],
                data_collator=default_data_collator,
            )  # fmt: skip
            begin = time.process_time()
            trainer.train()
            seconds = time.process_time() - begin
            sets = {"test": self.task.sets["test"], **self.task.others}
            with predicting_as_loaded(trainer.bayesian, trainer.posterior):
                found = evaluate(trainer.bayesian, sets, self.task.case, default_data_collator, batch_size=100)
            config = trainer.posterior.config
            calibration, chosen = config.calibration, config.method.get("temperature")
            free_energy = trainer.monitor.info.get("free_energy")
            choice = ("ladder_temperature", "ladder_nll", "ladder_lost", "ladder_drawn_at")
            ladder = {name: config.diagnostics[name] for name in choice if name in config.diagnostics}
            trainer.bayesian.detach()
        test = found.pop("test")
        results = evaluation_results(test, found, self.task.case.figures)
        kept = {name: results[name] for name in ("nll", "ece", "brier", "aurc", "auroc")}
        kept["accuracy"] = results["accuracy" if "accuracy" in results else "exact_match"]
        rates = {
            "learning_rate": trainer.active.settings.learning_rate if trainer.active else None,
            "warm_start": trainer.method.warm_start_learning_rate,
        }
        return {
            **kept, **{name: results[name] for name in ("total", "epistemic", "member_nll") if name in results},
            **({"gpu": torch.cuda.get_device_name()} if self.gpu else {"seconds": round(seconds)}),
            "cost": candidate.cost,
            "gradients": math.ceil(updates * candidate.gradients_per_update),
            "temperature": calibration.get("temperature", 1.0),
            "posterior_temperature": chosen, "heldout_nll": calibration.get("calibrated_nll"),
            "heldout_plain_nll": calibration.get("nll"), **rates, **ladder,
            **({} if free_energy is None else {"free_energy": float(free_energy.mean())}),
            "rows": np.round(1000 * row_means(test["nll"])).astype(int).tolist(),
        }  # fmt: skip


def experiment(args: Arguments, path: Path) -> dict[str, Any]:
    """Return the record after the missing runs."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
    begin = time.perf_counter()
    benches: dict[str, Bench] = {}
    made = tasks(args)
    done = {(run["task"], run["method"], run["seed"]) for run in record["runs"]}
    for seed in range(args.seeds):
        for name in args.tasks:
            benches[name] = benches.get(name) or Bench(made[name](), args.gpu)
            for candidate in benches[name].candidates():
                late = time.perf_counter() - begin > 60 * args.minutes
                left_out = args.methods and candidate.name not in args.methods
                if late or left_out or (name, candidate.name, seed) in done:
                    continue
                try:
                    times = LONG if candidate.name.endswith(LONGER) else 1
                    found = benches[name].run(candidate, seed, times * benches[name].task.gradients)
                except (ValueError, FloatingPointError) as error:
                    found = {"failure": str(error)}
                record["runs"].append({"task": name, "method": candidate.name, "seed": seed, **found})
                path.write_text(as_text(record))
                print(name, seed, candidate.name, {k: v for k, v in found.items() if k != "rows"}, flush=True)
    return record


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a table for each task that has runs."""
    tasks = dict.fromkeys(run["task"] for run in record["runs"])
    return {task: _table([run for run in record["runs"] if run["task"] == task]) for task in tasks}


def _table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of a task, best first; differences to plain fine-tuning are paired by test row and seed."""
    cells: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        cells.setdefault(run["method"], {})[run["seed"]] = run
    finished = {name: seeds for name, seeds in cells.items() if not any("failure" in run for run in seeds.values())}
    plain = [name for name in finished if name.startswith(PLAIN)]
    rival = min(plain, key=lambda name: _mean(finished[name], "nll")) if plain else None
    rows = []
    for name, seeds in sorted(finished.items(), key=lambda item: _mean(item[1], "nll")):
        difference = "-" if rival in (None, name) else _difference(seeds, finished[rival])
        shifts = next(iter(seeds.values()))["auroc"]
        rows.append([
            name, _spread(seeds, "accuracy"), _spread(seeds, "nll"), difference, _spread(seeds, "ece"),
            _spread(seeds, "brier"), spread([run["aurc"]["confidence"] for run in seeds.values()]),
            *(_detection(seeds, shift, by) for shift in shifts for by in ("total", "epistemic")),
            _spread(seeds, "temperature", 2), len(seeds), round(_mean(seeds, "gradients")), _seconds(seeds),
        ])  # fmt: skip
    shifts = list(next(iter(finished[name].values()))["auroc"]) if (name := next(iter(finished), "")) else []
    heads = [f"{shift}, {by}" for shift in shifts for by in ("TU", "EU")]
    scores = ["accuracy", "NLL", "NLL - plain's", "ECE", "Brier", "AURC"]
    columns = ["method", *scores, *heads, "t", "seeds", "gradients", "CPU s"]
    return table(columns, rows)


def _detection(seeds: Mapping[int, Mapping[str, Any]], shift: str, by: str) -> str:
    found = [run["auroc"][shift].get(by) for run in seeds.values()]
    return "-" if None in found else spread(found)  # one member has no epistemic uncertainty


def _difference(seeds: Mapping[int, Mapping[str, Any]], plain: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the mean difference of NLL over the seeds that both have, with its standard error over test rows."""
    both = sorted(set(seeds) & set(plain))
    if not both:
        return "-"
    ours, theirs = (np.mean([part[seed]["rows"] for seed in both], 0) / 1000 for part in (seeds, plain))
    return paired_difference(ours, theirs)


def _mean(seeds: Mapping[int, Mapping[str, Any]], name: str) -> float:
    return statistics.fmean(run[name] for run in seeds.values())


def _seconds(seeds: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the mean processor time of the runs on the CPU."""
    known = [run["seconds"] for run in seeds.values() if "seconds" in run]
    return str(round(statistics.fmean(known))) if known else "-"


def _spread(seeds: Mapping[int, Mapping[str, Any]], name: str, digits: int = 3) -> str:
    return spread([run[name] for run in seeds.values()], digits)


if __name__ == "__main__":
    continued(NAME, Arguments, experiment)
