from __future__ import annotations

import logging
import math
import warnings

import pytest
import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.diagnostics.convergence import ess, require_converged, rhat, rhat_by_chance


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator("draws"), dtype=torch.float64)


def autoregressive(coefficient: float, num_draws: int) -> Tensor:
    """Return [4, num_draws, 1] stationary draws with unit variance; their ESS is (1 - a) / (1 + a) of their number."""
    innovations = noise(4, num_draws, 1) * math.sqrt(1 - coefficient**2)
    draws = [noise(4, 1)]
    for step in range(num_draws - 1):
        draws.append(coefficient * draws[-1] + innovations[:, step])
    return torch.stack(draws, 1)


def test_rhat_is_one_for_equal_chains_and_catches_unequal_ones() -> None:
    draws = noise(4, 1000, 3)
    draws[0, :, 1] += 1
    draws[0, :, 2] *= 5
    good, shifted, wider = rhat(draws).tolist()
    assert abs(good - 1) < 0.01
    assert shifted > 1.05
    assert wider > 1.05  # the rank-normalised statistic folds the draws; the classical statistic does not detect this


def test_rhat_catches_a_trend_common_to_all_chains() -> None:
    drifting = noise(4, 200, 1) + torch.linspace(0, 3, 200)[:, None]
    assert rhat(drifting).item() > 1.1


def test_ess_is_that_of_an_autoregression() -> None:
    for coefficient in (0.0, 0.8):
        exact = 4 * 2000 * (1 - coefficient) / (1 + coefficient)
        assert ess(autoregressive(coefficient, 2000)).item() == pytest.approx(
            exact, rel=0.15
        )  # scatter of the estimator: 5 %


def test_undefined_rhat_and_ess_are_nan_and_nothing_is_printed(caplog: pytest.LogCaptureFixture) -> None:
    broken = noise(4, 100, 2)
    broken[0, 3, 0] = math.nan
    constant = torch.ones(4, 100, 1)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        assert rhat(broken).isnan().tolist() == [True, False]
        assert ess(broken).isnan().tolist() == [True, False]
        assert rhat(noise(8, 1, 2)).isnan().all()  # one draw a chain
        assert ess(noise(8, 3, 2)).isnan().all()
        assert rhat(noise(1, 100, 2)).isnan().all()  # one chain
        assert ess(noise(1, 100, 2)).isfinite().all()
        assert rhat(constant).isnan().all()
        assert ess(constant).isnan().all()
        assert rhat(torch.arange(4.0)[:, None, None].expand(4, 100, 1)).item() == math.inf  # stuck in different places
    assert not caplog.records


def test_draws_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rhat needs draws of shape \[M, S, k\], got \[4, 100\]"):
        rhat(noise(4, 100))


@pytest.mark.parametrize("num_values", [10, 60])
@pytest.mark.statistics
def test_rhat_by_chance_is_exceeded_at_its_promised_rate(num_values: int) -> None:
    limit = rhat_by_chance(4, num_values, probability=0.9)
    draws = noise(4, num_values, 1500)

    def plain_rhat(values: torch.Tensor) -> torch.Tensor:
        """Return the split R-hat [k] of draws [M, S, k], without ranks."""
        halves = values.unflatten(1, (2, -1)).flatten(0, 1)
        n, within = halves.shape[1], halves.var(1).mean(0)
        return ((n - 1) / n + halves.mean(1).var(0) / within).sqrt()

    error = math.sqrt(0.9 * 0.1 / 1500)  # standard error of the share
    assert abs((plain_rhat(draws) > limit).double().mean().item() - 0.1) < 4 * error
    apart = draws + torch.arange(4.0)[:, None, None] / 4  # the twin: means half a standard deviation apart
    assert (plain_rhat(apart) > limit).double().mean() > 0.15
    assert rhat_by_chance(4, 2 * num_values) < rhat_by_chance(4, num_values)


def test_an_unconverged_gold_standard_is_refused_in_words() -> None:
    good = torch.cat([noise(4, 200, 2), torch.ones(4, 200, 1)], 2)  # the third one never changes
    require_converged(good, "HMC")
    apart, few, broken = good.clone(), good[:, :20], good.clone()
    apart[0, :, 1] += 3
    broken[0, 0, 0] = math.nan
    for values, doubts in (
        (apart, r"R-hat 1\.\d+ where 1.05 is allowed, ESS \d+ where 100 is needed"),
        (few, r"ESS \d+ where 100 is needed"),
        (broken, "not all draws are finite"),
        (good[:1], "R-hat is not defined"),
        (torch.arange(4.0)[:, None, None].expand(4, 100, 1), "R-hat inf where"),
    ):
        with pytest.raises(ValueError, match=f"HMC cannot serve as a reference: .*{doubts}.*longer burn-in"):
            require_converged(values, "HMC")
    require_converged(few, "HMC", max_rhat=1.2, min_ess=20)


def test_an_ess_at_the_limit_of_arviz_is_no_estimate() -> None:
    draws = noise(2, 40, 1)
    swinging = 0.01 * draws + torch.tensor([1.0, -1.0]).repeat(20)[None, :, None]  # each draw undoes the last
    assert bool(ess(swinging).isnan().all())
    assert 30 < float(ess(draws)) < 160  # 80 independent draws


def test_ess_of_mirrored_chains_is_that_of_their_variances() -> None:
    """Squares of 8 mirrored chains scatter as those of 4: the unmended count of 8 chains is its broken twin."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(2000, 4, 50, generator=generator)
    squares = torch.stack([first, -first], 2).flatten(1, 2).square()
    true_size = 2 / float(squares.mean((1, 2)).var())  # the variance of a square is 2; known to 3 %
    values = squares[0][..., None]
    found = [float(ess(values, mirrored=mirrored)) for mirrored in (True, False)]
    assert found[0] == found[1] / 2
    assert 0.7 < found[0] / true_size < 1.3
    assert found[1] / true_size > 1.5
