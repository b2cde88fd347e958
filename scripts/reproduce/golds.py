"""Methods without a learning rate against the exact posteriors of ``gold_targets``.

    python -m scripts.reproduce.golds                  # runs missing in docs/results/golds.json
    python -m scripts.reproduce.golds sections12       # only on these targets

Every method has its own settings, and a budget in passes of one chain over the data. All runs are kept, and a later
call makes only missing ones. Targets without a gold are left out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, set_seed
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import logging

from hf_bayes import EnsembleConfig, LaplaceConfig, MAPConfig, MeanFieldConfig, SGHMCConfig, attach
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Approximation, Rule
from hf_bayes.methods.registry import rate_factor
from hf_bayes.objectives.batches import ChainBatches
from hf_bayes.objectives.data_access import DataAccess
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.starting import StartedRun, start_run
from hf_bayes.uncertainty.decomposition import decompose
from scripts.reproduce.gold_targets import GOLDS, RECIPES, Gold, Target, load, target, with_ones
from scripts.reproduce.report import RESULTS, keep, table

NAME = "golds"
BATCH = 64
NUM_CHAINS = 32
NUM_MEMBERS = 1000
"""Members of a Gaussian approximation in its predictions."""
CONTROL_VARIATE = 1.75
"""Gradients of an update, on average, where three quarters of the updates take two."""


class FeaturesConfig(PretrainedConfig):
    """The config of a linear layer on features."""

    model_type = "features"
    num_features = 384


class FeaturesForSequenceClassification(PreTrainedModel):
    """A linear layer on features: the last layer of an encoder."""

    config_class = FeaturesConfig
    main_input_name = "features"

    def __init__(self, config: FeaturesConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.num_features, config.num_labels)
        self.post_init()

    def forward(self, features: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Return logits, and the mean loss where there are labels."""
        logits = self.classifier(features)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        method: (draws of a chain) -> the config, without any setting but the number of members.
        passes: budget in passes of one chain over the data.
        draw_every: epochs between two draws of a chain; None takes one draw.
    """

    method: Callable[[int], MethodConfig]
    passes: float
    draw_every: float | None = None


def sghmc(draws: int) -> SGHMCConfig:
    """Return SGHMC with nothing set but the number of members."""
    return SGHMCConfig(num_chains=NUM_CHAINS, draws_per_chain=draws)


ROWS = {
    "MAP": Row(lambda draws: MAPConfig(), 30),
    "deep ensemble": Row(lambda draws: EnsembleConfig(num_chains=NUM_CHAINS), 1000),
    "mean-field VI": Row(lambda draws: MeanFieldConfig(num_chains=1), 100),
    "Laplace, diagonal": Row(lambda draws: LaplaceConfig(num_chains=1, structure="diagonal"), 30),
    "Laplace, K-FAC": Row(lambda draws: LaplaceConfig(num_chains=1, structure="kronecker"), 30),
    **{f"SGHMC, {passes} passes": Row(sghmc, passes, 0.3) for passes in (250, 500, 1000)},
}


class Counted:
    """An objective that counts its passes over the data and its updates with two gradients."""

    def __init__(self, objective: Any) -> None:
        self.objective, self.num_passes, self.num_anchors = objective, 0, 0
        self.words, self.place_of = objective.words, objective.place_of

    def for_update(self, batches: list[Any], **options: Any) -> Any:
        evaluate = self.objective.for_update(batches, **options)

        def counted(theta: Tensor, *, anchor: Tensor | None = None, **how: Any) -> Any:
            self.num_anchors += anchor is not None
            return evaluate(theta, anchor=anchor, **how)

        counted.info = evaluate.info  # type: ignore[attr-defined]
        return counted

    def data_pass(self, theta: Tensor, what: Any, *, gradient: bool) -> Any:
        """Pass over the data: of one chain for theta [d], of all for theta [M, d]."""
        self.num_passes += 1 if theta.ndim == 1 else len(theta)
        return self.objective.data_pass(theta, what, gradient=gradient)


def begin(rows: Target, row: Row, seed: int = 0) -> tuple[StartedRun, Iterator[Any]]:
    """Return a run before its first update, and the batches of its updates."""
    set_seed(seed)
    n, single = len(rows.features), row.method(1)
    share = CONTROL_VARIATE if single.requirements.learning_rate == "whitening" else 1.0
    num_steps = int(row.passes / single.num_chains / share * n / BATCH)
    draws = 1 if row.draw_every is None else min(num_steps // 4, int(num_steps / 2 * BATCH / n / row.draw_every))
    method = row.method(max(1, draws))
    config = FeaturesConfig(num_labels=rows.num_classes, problem_type="single_label_classification")
    model = attach(FeaturesForSequenceClassification(config), subspace="last_layer", num_members=method.num_chains)

    def take(numbers: Sequence[int]) -> dict[str, Tensor]:
        picked = torch.as_tensor(numbers)
        return {"features": rows.features[picked], "labels": rows.labels[picked]}

    def updates(chains: range | None) -> Iterator[Any]:
        many = {"accumulation": 1, "updates_per_epoch": num_steps}
        return ([take(some)] for some in ChainBatches(n, batch_size=BATCH, chains=chains, seed=seed, **many))

    started = start_run(
        model, method, DataScale(float(n), n, n, BATCH), num_steps=num_steps, learning_rate=None, seed=seed,
        batch_fraction=BATCH / n, shared=False, members_per_pass=method.num_chains,
        data=DataAccess(lambda numbers: (take(part) for part in _parts(numbers)), n),
        trial_updates=lambda: updates(None),
    )  # fmt: skip
    return started, updates(range(method.num_chains))


def _parts(numbers: Sequence[int], size: int = 256) -> list[Sequence[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def measured(rows: Target, gold: Gold, row: Row) -> dict[str, Any]:
    """Run a method, and return its distance to the gold and its cost."""
    clock = time.process_time()
    (run, _, _, settings), updates = begin(rows, row)
    run.objective = objective = Counted(run.objective)
    rule, chains, share = run.method, len(run.chains), BATCH / len(rows.features)
    assert isinstance(rule, Rule)
    gradients, trial, account = 0, settings.trial, {}
    for step in range(run.problem.num_steps):
        factor = rate_factor(settings.method, step, run.problem.draw_steps)
        rate = factor * (1.0 if settings.learning_rate is None else settings.learning_rate)
        before = objective.num_anchors
        info = run.update(next(updates), rate).info
        gradients += 1 + objective.num_anchors - before
        account |= {name: round(float(of.mean()), 3) for name, of in info.items() if name.startswith("trial_")}
    draws, passes = torch.stack(run.draws, 1), chains * share * gradients
    if rule.final_pass is None:
        found = run.finish()
    else:
        found = rule.final_pass(run.state, draws, objective.data_pass).approximation
    passes += objective.num_passes
    if trial is not None:
        passes += share * len(trial.losses) * trial.num_updates
    members = members_of(found)
    seconds = round(time.process_time() - clock, 1)
    scores = distance(members, rows, gold)
    return {**scores, "members": len(members), "passes": round(passes), "seconds": seconds, **account}


def members_of(found: Approximation) -> Tensor:
    """Return draws [K, d]: all that are stored, or ``NUM_MEMBERS`` of a Gaussian."""
    return found.sample(found.num_stored if found.kind == "draws" else NUM_MEMBERS, generator("members"))


def distance(members: Tensor, rows: Target, gold: Gold) -> dict[str, float]:
    """Return the mean total variation between the members' mixture and the gold's, and the ratio of mean EU."""
    num_weights = rows.num_classes * rows.features.shape[1]
    weights = torch.cat(
        [members[:, :num_weights].unflatten(1, (rows.num_classes, -1)), members[:, num_weights:, None]], 2
    )
    logits = torch.einsum("bp,mcp->mbc", with_ones(rows.test), weights).double()
    mixture = logits.softmax(-1).mean(0)
    variation = (mixture - gold.probs).abs().sum(1).mean() / 2
    return {"tv": float(variation), "eu": float(decompose(logits).epistemic.mean() / gold.epistemic.mean())}


def experiment(names: Sequence[str]) -> dict[str, Any]:
    """Return the record after the missing runs on these targets, by default on all that have a gold."""
    path = RESULTS / f"{NAME}.json"
    record = json.loads(path.read_text()) if path.exists() else {"seconds": 0, "golds": {}, "runs": {}}
    for name in names or [name for name in RECIPES if (GOLDS / f"{name}.safetensors").exists()]:
        rows, gold = target(name), load(name)
        if gold.about["rows"] != rows.digest():
            raise ValueError(f"{name}: the texts here are others than those of its gold: make it again")
        record["golds"][name] = {**gold.about, "n": len(rows.features), "classes": rows.num_classes}
        runs = record["runs"].setdefault(name, {})
        for label, row in ROWS.items():
            if label not in runs:
                runs[label] = measured(rows, gold, row)
                record["seconds"] = round(record["seconds"] + runs[label]["seconds"])
                path.write_text(json.dumps(record, indent=1) + "\n")
                print(name, label, runs[label], flush=True)
    return {key: record[key] for key in ("seconds", "golds", "runs")}


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    golds = [
        [name, of["classes"], of["n"], of["parameters"], of["rhat"], of["ess_min"], of["ess_median"]]
        for name, of in record["golds"].items()
    ]
    runs = [
        [name, label, f"{run['tv']:.4f}", f"{run['eu']:.3f}", run["passes"], run["members"], f"{run['seconds']:.0f}"]
        for name, found in record["runs"].items()
        for label, run in found.items()
    ]
    parts = ("trial_slope", "trial_at_start", "trial_at_draw", "trial_beside", "trial_fits", "trial_anchored")
    trials = [
        [name, label, *(f"{run[part]:.3g}" for part in parts)]
        for name, found in record["runs"].items()
        for label, run in found.items()
        if parts[0] in run
    ]
    columns = ["gold", "method", "slope", "V_0", "V_1", "V_d", "start at a draw", "have a control variate"]
    return {
        "golds": table(["gold", "classes", "rows", "parameters", "R-hat", "ESS, least", "ESS, median"], golds),
        "runs": table(["gold", "method", "TV", "EU / gold", "passes", "members", "CPU seconds"], runs),
        "trials": table(columns, trials),
    }


def main() -> None:
    """Make the missing runs and the page."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    keep(NAME, lambda: experiment(sys.argv[1:]))


if __name__ == "__main__":
    main()
