"""The choice of a start and of a gradient, from gradients whose slope and variances are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_bayes.methods.sgmcmc import laplace_trial
from hf_bayes.methods.sgmcmc.laplace_trial import Choice

DIM, COUNT = 400, 40


def choice_of(
    *, slope: float = 1.0, at_start: float = 4.0, common: float = 1.0, own: float = 0.0, cost: float = 2.0
) -> Choice:
    """Return the choice after gradients g_0 = sqrt(V_0) e and g_1 = slope v + sqrt(common) e + sqrt(own) f."""
    rng = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(1, DIM, generator=rng, dtype=torch.float64)

    direction, trial = normal(), laplace_trial.begin(torch.zeros(1, DIM, dtype=torch.float64))
    for _ in range(COUNT):
        noise = normal()
        at_draw = slope * direction + common**0.5 * noise + own**0.5 * normal()
        informed = torch.ones(1, DIM, dtype=torch.bool)
        trial = laplace_trial.take(trial, (at_start**0.5 * noise, at_draw), direction, informed)
    return laplace_trial.choose(trial, 0.01, cost)


def test_variances_and_slope_are_those_of_the_gradients() -> None:
    found = choice_of(slope=1.3, at_start=4.0, common=4.0, own=1.0)
    # 20 pairs x 400 directions: 1.6 %; the slope's error is sqrt(1 / (40 * 400)) = .008
    assert found.at_start.item() == pytest.approx(4.0, rel=0.07)
    assert found.at_draw.item() == pytest.approx(5.0, rel=0.07)
    assert found.beside.item() == pytest.approx(1.0, rel=0.07)
    assert found.slope.item() == pytest.approx(1.3, abs=0.04)


@pytest.mark.parametrize(
    ("gradients", "fits", "anchored"),
    [
        ({"common": 4.0, "own": 1.0}, True, True),  # 2 * 1 < 5
        ({"common": 4.0, "own": 6.0}, True, False),  # 2 * 6 > 10
        ({"common": 4.0, "own": 2.0, "cost": 2.5}, True, True),  # 2.5 * 2 < 6
        ({"common": 4.0, "own": 2.4, "cost": 3.0}, True, False),  # 3 * 2.4 > 6.4
        ({"common": 4.0, "own": 0.5, "slope": 3.0}, False, False),
        ({"common": 4.0, "own": 0.5, "slope": 0.3}, False, False),
        ({"common": 4.0, "own": 16.0}, False, False),  # noisier by a factor of 5: LoRA, too far from its warm start
    ],
)
def test_the_choice_follows_from_slope_and_variances(gradients: dict[str, float], fits: bool, anchored: bool) -> None:
    found = choice_of(**gradients)
    assert (bool(found.fits), bool(found.anchored)) == (fits, anchored)
    expected = found.beside if anchored else found.at_draw if fits else found.at_start
    assert torch.equal(found.variance, expected)


def test_a_pass_over_all_rows_counts_among_the_updates() -> None:
    """200 updates of a 50th of the rows take as many gradients as four passes, and one more pass makes it 9 / 4."""
    assert laplace_trial.cost_of_anchor(200, 1 / 50) == pytest.approx(2.25)
    assert laplace_trial.cost_of_anchor(49, 1 / 49) == pytest.approx(3)  # 1 / 49 * 49 is below 1 in float64
    assert laplace_trial.cost_of_anchor(48, 1 / 49) == math.inf  # the pass is longer than the run
    assert laplace_trial.cost_of_anchor(200, None) == 2


def test_without_the_gradient_of_all_rows_no_chain_is_anchored() -> None:
    found = laplace_trial.without_anchor(choice_of(common=4.0, own=1.0))
    assert not bool(found.anchored)
    assert torch.equal(found.variance, found.at_draw)


def test_noise_below_the_least_counts_as_the_least() -> None:
    """Gradients without noise: two of them for an update could not make the steps larger."""
    found = choice_of(at_start=0.0, common=0.0)
    assert found.variance.item() == 0.01
    assert not bool(found.anchored)
