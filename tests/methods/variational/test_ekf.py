from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from hf_bayes.core.types import UNNAMED, Evaluation, Problem, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import dense
from hf_bayes.distributions.energy import FlatPrior, LaplacePrior
from hf_bayes.methods.variational.ekf import MOST_PARAMETERS, EKFConfig
from scripts.reproduce.exact_widths import DIM, NUM_ROWS, Regression
from tests.runs import trainer

TARGET = Regression.with_prior(2.0)
MIXTURE = Gaussian.diagonal(torch.zeros(2, DIM), torch.ones(2, DIM))
structures = pytest.mark.parametrize("structure", ["diagonal", "full"])


def problem(**changes: Any) -> Problem:
    share = 1 / NUM_ROWS
    return Problem(NUM_ROWS, TARGET.prior, 1.0, 20, 0, {"": (DIM,)}, update_fraction=share)._replace(**changes)


def filtered(config: EKFConfig, num_steps: int = 20, rate: float = 1.0) -> Gaussian:
    """Return q after one row in each update."""
    rule = config.build(problem())
    assert isinstance(rule, Rule)
    state = rule.init(torch.zeros(1, DIM, dtype=torch.float64), [])
    for row in range(num_steps):
        theta, state = rule.locate(state, [])
        state, _ = rule.update(state, TARGET.evaluate(theta, torch.tensor([[row]])), rate, [])
    found = rule.finish(state, state.theta[:, None])
    assert isinstance(found, Gaussian)
    return found


def plain(structure: str, rate: float, sign: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and covariance of the filter, in numpy."""
    mean, precision = np.zeros(DIM), np.eye(DIM) / 4.0
    for x, y in zip(TARGET.x.numpy()[:20], TARGET.y.numpy()[:20], strict=True):
        g = (y - 1 / (1 + np.exp(-x @ mean))) * x
        fisher = np.outer(g, g) if structure == "full" else np.diag(g**2)
        precision = precision + sign * rate * fisher
        mean = mean + rate * np.linalg.solve(precision, g)
    return mean, np.linalg.inv(precision)


@structures
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_twenty_rows_equal_the_equations(structure: Literal["diagonal", "full"], rate: float) -> None:
    q = filtered(EKFConfig(structure=structure), rate=rate)
    mean, covariance = plain(structure, rate)
    np.testing.assert_allclose(q.means[0], mean, rtol=1e-12, atol=1e-12)  # the requirement
    np.testing.assert_allclose(dense(q.covariances[0], q.means), covariance, rtol=1e-12, atol=1e-12)
    _, wrong = plain(structure, 0.1 * rate, sign=-1.0)  # the twin: the information is subtracted
    assert np.abs(dense(q.covariances[0], q.means).numpy() - wrong).max() > 0.1


@structures
def test_temperature_tempers_as_documented(structure: Literal["diagonal", "full"]) -> None:
    for temper, start in (("posterior", 0.5), ("likelihood", 0.25)):
        config = EKFConfig(structure=structure, temperature=0.5, temper=temper)  # type: ignore[arg-type]
        q = filtered(config, num_steps=0)
        assert torch.allclose(q.covariances[0].precision_diagonal, torch.full((DIM,), start, dtype=torch.float64))
    colder = EKFConfig(structure=structure, temperature=0.5, temper="likelihood")
    once, doubled = filtered(colder), filtered(EKFConfig(structure=structure), rate=2.0)
    torch.testing.assert_close(once.means, doubled.means)


@pytest.mark.statistics
@structures
def test_a_stream_of_rows_gives_the_width_of_the_posterior(structure: Literal["diagonal", "full"]) -> None:
    count = 2000
    rows = torch.from_numpy(np.random.default_rng(0).normal(0.7, 1.0, count))
    rule = EKFConfig(structure=structure, init_std=3.0).build(problem(shapes={UNNAMED: (1,)}, update_fraction=None))
    assert isinstance(rule, Rule)
    state = rule.init(torch.zeros(1, 1, dtype=torch.float64), [])
    for row in rows:
        state, _ = rule.update(state, Evaluation(torch.zeros(1), row - state.theta), 1.0, [])
    q = rule.finish(state, state.theta[:, None])
    assert isinstance(q, Gaussian)
    # the mean square of 2,000 normal numbers has a standard error of 3 %, the std half of it: 4 of them
    assert abs(float(q.stds) * math.sqrt(count) - 1) < 0.065
    assert abs(float(q.means - rows.mean())) < 0.5 * float(q.stds)
    assert abs(float(q.stds) * math.sqrt(2 * count) - 1) > 0.065  # the twin: every row counts twice


def test_the_prior_may_be_another_posterior() -> None:
    means, stds = torch.zeros(1, DIM, dtype=torch.float64), torch.full((1, DIM), 2.0, dtype=torch.float64)
    for structure in ("diagonal", "full"):
        config = EKFConfig(structure=structure)  # type: ignore[arg-type]
        starts = [
            config.build(problem(prior=prior)).init(means, []).precision  # type: ignore[union-attr, call-arg]
            for prior in (TARGET.prior, Gaussian.diagonal(means, stds))
        ]
        assert torch.equal(*starts)


def test_a_second_pass_is_refused() -> None:
    EKFConfig().build(problem(num_steps=200))
    EKFConfig().build(problem(num_steps=7, update_fraction=32 / 200))  # the last update ends the first pass
    with pytest.raises(ValueError, match=r"one pass over the data, 7 updates, got 8: .* counts every row twice"):
        EKFConfig().build(problem(num_steps=8, update_fraction=32 / 200))
    with pytest.raises(ValueError, match="one pass over the data, 4 updates, got 5"):
        EKFConfig().build(problem(num_steps=5, update_fraction=None, batch_fraction=0.25, shapes={UNNAMED: (DIM,)}))


@pytest.mark.parametrize(("rows", "batch", "updates"), [(200, 32, 7), (33, 32, 2), (320, 32, 10), (200, 32, 3)])
def test_a_run_counts_no_row_twice(rows: int, batch: int, updates: int) -> None:
    rule = EKFConfig(init_std=1e3).build(problem(num_steps=updates, update_fraction=batch / rows))
    assert isinstance(rule, Rule)
    state = rule.init(torch.zeros(1, DIM, dtype=torch.float64), [])
    counted = 0.0
    for _ in range(updates):
        state, info = rule.update(state, Evaluation(torch.full((1,), rows), torch.zeros(1, DIM)), 1.0, [])
        counted += float(info["log_lik"])
    assert counted == pytest.approx(min(rows, updates * batch))  # without the last update, every row has its weight


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (EKFConfig(), {"prior": FlatPrior()}, r"got a FlatPrior: use .* or give sample .*prior=1\.0"),
        (
            EKFConfig(),
            {"prior": LaplacePrior(*torch.ones(2))},
            "starts from one Gaussian, got a LaplacePrior: use prior='gau",
        ),
        (EKFConfig(), {"prior": MIXTURE}, r"got a mixture of 2: give one Gaussian, such as its \.single\(\)"),
        (EKFConfig(), {"shapes": {"a": (DIM,)}, "update_fraction": None}, "must be known, got an iterable data set"),
        (EKFConfig(structure="full"), {"shapes": {"": (MOST_PARAMETERS + 1,)}}, "needs at most 4096 random parameters"),
    ],
)
def test_runs_that_cannot_be_filtered_are_refused(config: EKFConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.build(problem(**changes))


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"structure": "low_rank"}, {"init_std": 0.0}])
def test_bad_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"ekf: {next(iter(fields))} must be"):
        EKFConfig(**fields)


def test_the_trainer_filters_one_pass_and_refuses_two(tmp_path: Path) -> None:
    made = trainer(tmp_path / "one", EKFConfig(), num_train_epochs=1, max_steps=-1, learning_rate=None)
    made.train()
    q = made.posterior.approximation
    assert isinstance(q, Gaussian)
    assert (q.stds > 0).all()
    with pytest.raises(ValueError, match="counts every row twice"):
        trainer(tmp_path / "two", EKFConfig(), num_train_epochs=2, max_steps=-1, learning_rate=None).train()
