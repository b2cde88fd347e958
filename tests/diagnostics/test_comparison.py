from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hf_bayes.core.types import RowScores
from hf_bayes.diagnostics.comparison import difference_std_error, row_scores
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training.map_comparison import map_of_run
from tests import runs


def test_rows_sum_the_nll_of_their_own_terms() -> None:
    found = row_scores([1.0, 2.0, 4.0, 8.0], [2, 0, 1, 1])
    assert (found.nll.tolist(), found.terms.tolist()) == ([3.0, 0.0, 4.0, 8.0], [2, 0, 1, 1])


@pytest.mark.statistics
def test_the_standard_error_is_that_of_repeated_data() -> None:
    """Check rows whose tokens share an effect. If tokens count as independent (the twin), the error is too small."""
    rng = np.random.default_rng(0)
    differences, errors, naive = [], [], []
    for _ in range(400):
        terms = rng.choice([5, 50], 60)
        gaps = np.repeat(rng.normal(0.1, 0.3, 60), terms) + rng.normal(0, 0.3, terms.sum())
        zeros = row_scores(np.zeros(terms.sum()), terms)
        differences.append(gaps.mean())
        errors.append(difference_std_error(row_scores(gaps, terms), zeros))
        naive.append(gaps.std() / np.sqrt(len(gaps)))
    spread = np.std(differences)
    assert np.mean(errors) == pytest.approx(spread, rel=0.12)  # 3 standard errors of a standard deviation at 400
    assert np.mean(naive) < 0.5 * spread


@pytest.mark.parametrize(
    "other",
    [RowScores(np.zeros(1), np.ones(1, int)), RowScores(np.zeros(3), np.array([1, 2, 1]))],
    ids=["one", "other"],
)
def test_rows_that_cannot_be_paired_have_no_standard_error(other: RowScores) -> None:
    rows = RowScores(np.zeros(len(other.nll)), np.ones(len(other.nll), int))
    assert difference_std_error(rows, other) is None


@pytest.mark.models
def test_a_save_stores_the_standard_error_of_its_rows(tmp_path: Path) -> None:
    rows = runs.token_rows([8, 3, 6, 5], seed=1)
    options = {"collator": runs.padding_collator(), "eval_dataset": rows, "per_device_eval_batch_size": 3}
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), train=rows, **options)
    trainer.train()
    trainer.evaluate()
    trainer.evaluate(
        trainer.eval_dataset.select([0])
    )  # other rows, which must not be used in place of the rows of the trainer
    trainer.save_model()
    metrics = Posterior.from_pretrained(tmp_path).config.metrics
    point, collate, means = map_of_run(trainer.posterior, trainer.active), runs.padding_collator(), []
    for theta in (trainer.bayesian.current, point):
        with torch.no_grad(), trainer.bayesian.showing(theta):
            means.append(np.array([float(trainer.bayesian(**collate([row])).loss) for row in rows]))
    counts = np.array([len(row["labels"]) - 1 for row in rows])
    gaps = (means[0] - means[1]) * counts
    mean = gaps.sum() / counts.sum()
    assert mean == pytest.approx(metrics["nll"] - metrics["map_nll"], abs=1e-5)
    expected = np.sqrt(4 / 3 * np.square(gaps - mean * counts).sum()) / counts.sum()
    assert metrics["map_nll_difference_std_error"] == pytest.approx(expected, rel=1e-3)
