"""Accuracy of standard deviations by variational inference with minibatches: the table of docs/variational.md.

    python -m scripts.reproduce.variational_widths             # lines that docs/variational.json lacks

The target is a logistic regression whose best diagonal and full Gaussians are known to 1e-9. BLoB has the same
regression with weights B A, and the best q of its own family. Each line of the table is
one method and number of updates, in 32 chains with noise and batches of their own.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import machine
from benchmarks.table import replaced
from hf_bayes import BLoBConfig, FullRankVIConfig, IVONConfig, LowRankVIConfig, MeanFieldConfig
from hf_bayes.core.config import MethodConfig
from hf_bayes.distributions.covariance import dense
from scripts.reproduce.exact_factors import FactoredRegression
from scripts.reproduce.exact_widths import DIM, NUM_ROWS, Optimum, Regression, fit, relative_widths
from scripts.reproduce.report import as_text, circumstances, table

DOCS = Path(__file__).parents[2] / "docs"
RECORD, PAGE = DOCS / "variational.json", DOCS / "variational.md"
NUM_CHAINS, BATCH, UPDATES, LEARNING_RATE = 32, 32, 5000, 0.01
PRIORS = (1.0, 10.0)


class Line(NamedTuple):
    """A line of the table.

    Attributes:
        name: the first column.
        method: the config of the method.
        batch: rows of an update; None for all.
        share: updates, as a share of ``UPDATES``.
        target: the kind of regression.
    """

    name: str
    method: MethodConfig
    batch: int | None = BATCH
    share: float = 1.0
    target: type[Regression] = Regression

    @property
    def correlates(self) -> bool:
        """Check whether q has correlations, so that it ends at the best full Gaussian."""
        return isinstance(self.method, LowRankVIConfig | FullRankVIConfig)

    def num_updates(self, updates: int) -> int:
        """Return the updates of this line, given the updates of a full line."""
        return round(self.share * updates)

    def num_gradients(self, updates: int) -> int:
        """Return the gradients of this line, given the updates of a full line."""
        return math.ceil(self.num_updates(updates) * self.method.requirements.gradients_per_update)


LINES = (
    Line("`mean_field`", MeanFieldConfig(), None),
    Line("`mean_field`", MeanFieldConfig()),
    Line("`mean_field`, 2,500 updates", MeanFieldConfig(), share=0.5),
    Line("`mean_field`, `num_draws=1`", MeanFieldConfig(num_draws=1), None),
    Line("`mean_field`, `num_draws=1`", MeanFieldConfig(num_draws=1)),
    Line(
        "`mean_field`, `num_draws=1`, `std_learning_rate=0.002`", MeanFieldConfig(num_draws=1, std_learning_rate=0.002)
    ),
    Line("`mean_field`, `num_draws=4`, 2,500 updates", MeanFieldConfig(num_draws=4), share=0.5),
    Line("`mean_field`, `num_draws=4`", MeanFieldConfig(num_draws=4)),
    Line("`low_rank_vi`, rank 6", LowRankVIConfig(rank=DIM)),
    Line("`low_rank_vi`, rank 6, 2,500 updates", LowRankVIConfig(rank=DIM), share=0.5),
    Line("`low_rank_vi`, rank 6, `num_draws=1`", LowRankVIConfig(rank=DIM, num_draws=1)),
    Line("`full_rank_vi`", FullRankVIConfig()),
    Line("`full_rank_vi`, 2,500 updates", FullRankVIConfig(), share=0.5),
    Line("`full_rank_vi`, `num_draws=1`", FullRankVIConfig(num_draws=1)),
    Line("`ivon`", IVONConfig(), None),
    Line("`ivon`", IVONConfig()),
    Line("`ivon`, `pair_period=None`", IVONConfig(pair_period=None)),
    Line("`ivon`, `num_draws=2`, 2,500 updates", IVONConfig(num_draws=2), share=0.5),
    Line("`ivon`, `num_draws=2`", IVONConfig(num_draws=2)),
    Line("`ivon`, `num_draws=4`", IVONConfig(num_draws=4)),
    Line("`blob`", BLoBConfig(), None, target=FactoredRegression),
    Line("`blob`", BLoBConfig(), target=FactoredRegression),
    Line("`blob`, `num_draws=1`", BLoBConfig(num_draws=1), target=FactoredRegression),
)


def accuracy(line: Line, target: Regression, best: Optimum, *, updates: int, num_chains: int) -> dict[str, float]:
    """Return the scatter and the bias of standard deviations, relative, and the mean excess of F in nats."""
    steps = line.num_updates(updates)
    rate = steps**-0.5 if isinstance(line.method, IVONConfig) else LEARNING_RATE
    found = fit(target, line.method, num_steps=steps, learning_rate=rate, batch=line.batch, num_chains=num_chains)
    relative = relative_widths(target, found, best) - 1
    excess = [
        float(target.free_energy(mean, dense(covariance, mean))) - best.free_energy
        for mean, covariance in zip(found.means, found.covariances, strict=True)
    ]
    return {
        "scatter": float(relative.var(0).mean().sqrt()),
        "bias": float(relative.mean(0).abs().max()),
        "free_energy": sum(excess) / len(excess),
    }


def run(*, updates: int = UPDATES, num_chains: int = NUM_CHAINS, kept: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the accuracy of every line, for both priors; lines in ``kept`` are not run again."""
    start, lines = time.perf_counter(), []
    known = {(line["name"], line["rows"], line["gradients"]): line for line in kept}
    for line in LINES:
        about = {"name": line.name, "rows": line.batch, "gradients": line.num_gradients(updates)}
        before = known.get(tuple(about.values()))
        if before is None:
            found = {}
            for prior in PRIORS:
                target = line.target.with_prior(prior)
                best = target.optimum(full=line.correlates)
                found[f"{prior:g}"] = accuracy(line, target, best, updates=updates, num_chains=num_chains)
            before = {**about, "priors": found}
            print(before, flush=True)
        lines.append(before)
    return {"seconds": round(time.perf_counter() - start), "updates": updates, "chains": num_chains, "lines": lines}


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the table, and the circumstances of the run."""
    heads = [f"{what}, prior {prior:g}" for what in ("scatter", "bias", "F") for prior in PRIORS]
    found = []
    for line in record["lines"]:
        cells = [line["priors"][f"{prior:g}"] for prior in PRIORS]
        shares = [f"{100 * cell[what]:.1f} %" for what in ("scatter", "bias") for cell in cells]
        rows = f"{NUM_ROWS} (all)" if line["rows"] is None else line["rows"]
        nats = [f"{cell['free_energy']:.4f}" for cell in cells]
        found.append([line["name"], rows, f"{line['gradients']:,}", *shares, *nats])
    return {
        "widths": table(["method", "rows of an update", "gradients", *heads], found),
        "circumstances": circumstances(record),
    }


def main() -> None:
    """Run the lines that the record lacks, keep the record, and make the table of the page."""
    torch.set_num_threads(1)
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {"seconds": 0, "lines": []}
    record = {**run(kept=before["lines"]), "machine": machine("cpu")}
    record["seconds"] += before["seconds"]
    RECORD.write_text(as_text(record))
    text = PAGE.read_text()
    for name, found in blocks(record).items():
        text = replaced(text, name, found)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
