from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Problem
from hf_bayes.distributions.energy import FlatPrior, GaussianPrior
from hf_bayes.methods.assembly import with_batch_posterior
from hf_bayes.methods.mcmc import penalty
from hf_bayes.methods.mcmc.penalty import PenaltyConfig, noise_penalty, variance_of_mean
from tests.methods.mcmc.batched import SD, Batches, N, disjoint, independent, variance_ratio
from tests.streams import share_one_stream


def walk(step: float = 0.5, **fields: Any) -> PenaltyConfig:
    """Return a config whose proposal has ``step`` posterior standard deviations."""
    return PenaltyConfig(step_size=step * SD, target_acceptance=None, **fields)


@pytest.fixture
def one_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    share_one_stream(monkeypatch, penalty)


# ------------------------------------------------------------------------------------------------------------ law


@pytest.mark.parametrize(("count", "n", "step", "num_chains"), [(2, 50, 1.0, 5000), (20, 20, 0.5, 3000)])
@pytest.mark.usefixtures("one_generator")
@pytest.mark.statistics
def test_with_the_variance_known_the_law_is_exact(
    monkeypatch: pytest.MonkeyPatch, count: int, n: int, step: float, num_chains: int
) -> None:
    """The variance of d_j = N (theta' - theta) (mean of n rows), with one penalty for all: half of it (eq. 7)."""
    batches = Batches(independent(n), count, num_chains)

    def known(difference: Tensor) -> Tensor:
        return (N * (batches.asked[-1] - batches.asked[-2])[:, 0]).square() / (n * count)

    monkeypatch.setattr(penalty, "variance_of_mean", known)
    monkeypatch.setattr(penalty, "noise_penalty", lambda variance, num_batches: variance / 2)
    ratio, error, _ = variance_ratio(walk(step), batches, num_steps=720)
    assert error < 0.005
    assert 0.98 < ratio < 1.02


TESTED = {  # config, batches of an update
    "walk": (walk(), 20),
    "langevin": (walk(num_leapfrog=1, proposal_batches=20), 40),
    "hamiltonian": (walk(0.3, num_leapfrog=4, proposal_batches=40), 80),
}


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.usefixtures("one_generator")
@pytest.mark.statistics
def test_the_law_is_close_with_variance_from_20_batches(name: str) -> None:
    config, count = TESTED[name]
    ratio, error, info = variance_ratio(config, Batches(independent(20), count, 800))
    assert error < 0.0125  # the bounds are 4 standard errors away
    assert 0.95 < ratio < 1.05
    assert info["beyond_series"] < 0.05


@pytest.mark.usefixtures("one_generator")
@pytest.mark.statistics
def test_the_law_check_catches_a_dropped_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalty, "noise_penalty", lambda variance, num_batches: 0 * variance)
    ratio, error, _ = variance_ratio(walk(), Batches(independent(20), 20, 500))
    assert ratio - 4 * error > 1.05


@pytest.mark.usefixtures("one_generator")
@pytest.mark.statistics
def test_half_the_estimated_variance_is_too_small_a_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    corrected, error, info = variance_ratio(walk(), Batches(independent(40), 10, 2500))
    assert info["beyond_series"] < 0.06
    monkeypatch.setattr(penalty, "noise_penalty", lambda variance, num_batches: variance / 2)
    half, _, _ = variance_ratio(walk(), Batches(independent(40), 10, 2500))
    assert half - 1 > 4 * error
    assert abs(corrected - 1) < 0.5 * (half - 1)


class Stale(Batches):
    """The broken twin: theta keeps the batches of its acceptance, as it keeps its energy in exact Metropolis."""

    at: Tensor | None = None

    def renew(self) -> None:
        super().renew()
        self.kept = self.means if self.at is None else self.kept
        self.fresh = self.means

    def __call__(self, theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation:
        if self.asked:  # the second call of a move is the proposal's
            self.means, self.at = self.fresh, theta
        else:
            accepted = torch.zeros_like(theta, dtype=torch.bool) if self.at is None else theta == self.at
            self.means = self.kept = torch.where(accepted, getattr(self, "used", self.kept), self.kept)
            self.used = self.fresh
        return super().__call__(theta, gradient=gradient, batches=batches)


@pytest.mark.usefixtures("one_generator")
@pytest.mark.statistics
def test_the_law_check_catches_new_batches_for_the_proposal_only() -> None:
    ratio, error, _ = variance_ratio(walk(), Stale(independent(20), 20, 500))
    assert ratio - 4 * error > 1.05


class OneSet(Batches):
    """The broken twin: the proposal's gradient uses the batches of the test."""

    def __call__(self, theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation:
        return super().__call__(theta, gradient=gradient)


@pytest.mark.usefixtures("one_generator")
@pytest.mark.statistics
def test_the_law_check_catches_a_proposal_that_has_seen_the_test() -> None:
    """The step is one posterior standard deviation, and the test has enough batches for its variance."""
    config = walk(1.0, num_leapfrog=1, proposal_batches=20)
    ratio, error, info = variance_ratio(config, OneSet(independent(20), 40, 1500))
    assert info["beyond_series"] < 0.05
    assert ratio - 4 * error > 1.05
    apart, _, _ = variance_ratio(config, Batches(independent(20), 60, 700))
    assert 0.95 < apart < 1.05


@pytest.mark.usefixtures("one_generator")
@pytest.mark.statistics
def test_the_law_check_catches_a_forgotten_reverse_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    leapfrog = penalty.leapfrog

    def forgetful(theta: Tensor, momentum: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        end, _, value, gradient = leapfrog(theta, momentum, *rest)
        return end, momentum, value, gradient

    monkeypatch.setattr(penalty, "leapfrog", forgetful)
    ratio, error, _ = variance_ratio(TESTED["langevin"][0], Batches(independent(20), 40, 500))
    assert ratio + 4 * error < 0.95


@pytest.mark.parametrize("n", [20, 40])
@pytest.mark.usefixtures("one_generator")
@pytest.mark.statistics
def test_rows_that_come_once_in_an_update_are_corrected_for(n: int) -> None:
    """The updates use half of the data, and all data, where the penalty is 0."""
    config, batches = walk(replacement=False), Batches(disjoint(n), 25, 800)
    ratio, error, info = variance_ratio(config, batches, fraction=n / N)
    assert error < 0.0125
    assert 0.95 < ratio < 1.05
    assert info["finite_population_factor"] == pytest.approx(1 - 25 * n / N)
    assert (info["penalty"] == 0) == (n == 40)


@pytest.mark.usefixtures("one_generator")
@pytest.mark.statistics
def test_the_check_catches_disjoint_rows_taken_as_independent() -> None:
    ratio, error, _ = variance_ratio(walk(), Batches(disjoint(20), 25, 500))
    assert ratio + 4 * error < 0.95  # over-penalised: 0.85


# -------------------------------------------------------------------------------------------------------- one move


def test_the_penalty_is_the_series_of_ceperley_and_dewing() -> None:
    difference = torch.tensor([[1.0, 2.0, 4.0, 9.0]], dtype=torch.float64)
    mean = 4.0
    chi2 = sum((d - mean) ** 2 for d in (1.0, 2.0, 4.0, 9.0)) / (4 * 3)  # eq. 17
    assert variance_of_mean(difference).item() == pytest.approx(chi2)
    expected = chi2 / 2 + chi2**2 / (4 * 5) + chi2**3 / (3 * 5 * 7)
    assert noise_penalty(torch.tensor(chi2), 4).item() == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.usefixtures("one_generator")
def test_langevin_acceptance_uses_both_proposal_densities(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """The reference uses eq. 10 with eta = e^2 / 2, the gradients of batch 0 and the losses of other batches."""
    seen: dict[str, tuple[Tensor, ...]] = {}
    leapfrog, size = penalty.leapfrog, 0.5 * SD

    def keeping(*args: Any) -> tuple[Tensor, ...]:
        seen["end"] = leapfrog(*args)
        return seen["end"]

    monkeypatch.setattr(penalty, "leapfrog", keeping)
    prior = GaussianPrior(torch.tensor(0.0, dtype=torch.float64), torch.tensor(SD, dtype=torch.float64))
    config = walk(num_leapfrog=1, temperature=temperature)
    kernel, batches = config.build(Problem(N, prior, SD, 1, 0, {"": (1,)})), Batches(independent(20), 5, 50)
    theta, rng = SD * torch.randn(50, 1, dtype=torch.float64, generator=generator("at")), generator("move")
    _, info = kernel.step(kernel.init(theta, batches, [rng]), batches, [rng])
    new, eta = seen["end"][0], size**2 / 2

    def gradient(at: Tensor) -> Tensor:  # of (-log p - log prior) / T, by batch 0
        return (-N * (batches.means[:, :1] - at) + at / SD**2) / temperature

    def log_q(to: Tensor, at: Tensor) -> Tensor:
        return -((to - at + eta * gradient(at)) ** 2)[:, 0] / (4 * eta)

    def losses(at: Tensor) -> Tensor:
        return (-N * (batches.means[:, 1:] * at - at**2 / 2) + at**2 / (2 * SD**2)) / temperature

    difference = losses(new) - losses(theta)
    penalised = difference.mean(1) + noise_penalty(variance_of_mean(difference), 4)
    expected = (log_q(theta, new) - log_q(new, theta) - penalised).clamp(max=0).exp()
    torch.testing.assert_close(info["acceptance"], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("one_generator")
def test_both_ends_of_a_move_share_batches_and_the_next_does_not() -> None:
    batches = Batches(independent(20), 20, 3)
    seen: list[tuple[Tensor, Tensor]] = []

    def evaluate(theta: Tensor, **options: Any) -> Evaluation:
        seen.append((theta, batches.means))
        return batches(theta, **options)

    kernel, rng = walk().build(Problem(N, FlatPrior(), SD, 9, 0, {"": (1,)})), generator(0)
    state = kernel.init(torch.zeros(3, 1, dtype=torch.float64), evaluate, [rng])
    seen.clear()
    for _ in range(3):
        batches.renew()
        state, _ = kernel.step(state, evaluate, [rng])
    assert [torch.equal(a[1], b[1]) for a, b in pairwise(seen)] == [True, False, True, False, True]


# ------------------------------------------------------------------------------------------------ what a user meets


def mean_of_batch(theta: Tensor, batch: Tensor) -> Tensor:
    return N * (theta - batch.mean()).square().sum(1) / 2


def draws(config: PenaltyConfig, **arguments: Any) -> Any:
    rows, rng = torch.randn(N, dtype=torch.float64, generator=generator("rows")), generator("order")

    def batches() -> Any:
        while True:
            yield rows[torch.randperm(N, generator=rng)[:50]]

    arguments = {"batches": batches, "batches_per_step": 20, "num_steps": 60, "burn_in": 20} | arguments
    return sample(
        mean_of_batch, torch.zeros(4, 1, dtype=torch.float64), config, learning_rate=SD, num_data=N, **arguments
    )


def test_sample_reports_acceptance_and_penalty() -> None:
    info = draws(PenaltyConfig()).info
    assert {"acceptance", "penalty", "beyond_series", "finite_population_factor", "step_size"} <= set(info)
    assert (info["finite_population_factor"] == 1).all()
    assert (info["penalty"] > 0).all()
    halved = draws(PenaltyConfig(replacement=False), batch_fraction=0.05, batches_per_step=10).info
    assert torch.allclose(halved["finite_population_factor"], torch.tensor(0.5, dtype=torch.float64))


def test_it_warns_where_the_variance_is_too_large_to_correct() -> None:
    with pytest.warns(UserWarning, match=r"penalty: in \d+% of the moves the variance .* was above K / 4"):
        draws(PenaltyConfig(step_size=5 * SD, target_acceptance=None), batches_per_step=3)


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        (
            {},
            {"batches_per_step": 1},
            "at least 2 batches per update to estimate their variance, got batches_per_step=1",
        ),
        ({"num_leapfrog": 1, "proposal_batches": 2}, {"batches_per_step": 3}, "at least 4 batches per update"),
        ({}, {"batches": None, "batches_per_step": 1}, "at least 2 batches per update"),
        ({"replacement": False}, {}, "replacement=False needs batch_fraction=n / N, got None"),
        ({"batch_posterior": True}, {}, "batch_posterior needs a trainer"),
    ],
)
def test_an_unknown_variance_or_target_is_refused(
    fields: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        draws(PenaltyConfig(**fields), **arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"num_leapfrog": -1}, "num_leapfrog must be an integer >= 0, got -1"),
        ({"proposal_batches": 0}, "proposal_batches must be an integer >= 1, got 0"),
        ({"step_size": 0.0}, "step_size must be a finite number > 0, got 0.0"),
        ({"target_acceptance": 1.0}, "target_acceptance must be a finite number > 0 and < 1, got 1.0"),
        ({"num_leapfrog": 1, "replacement": False}, "num_leapfrog=1 needs replacement=True"),
        ({"batch_posterior": True, "temperature": 2.0}, "batch_posterior sets temperature and temper itself"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PenaltyConfig(**fields)


def test_batch_posterior_is_a_likelihood_tempered_by_batch_share() -> None:
    config = with_batch_posterior(PenaltyConfig(batch_posterior=True, prior_std=0.3), 60 / 2992)
    assert config == PenaltyConfig(temper="likelihood", temperature=2992 / 60, prior_std=0.3)
    assert with_batch_posterior(PenaltyConfig(prior_std=0.3), 0.1) == PenaltyConfig(prior_std=0.3)
