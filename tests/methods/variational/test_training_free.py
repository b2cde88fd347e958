from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_bayes.core.types import Problem, RowScores
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.variational.lora_coordinates import canonical
from hf_bayes.methods.variational.training_free import MAX_PASSES, WIDEST_RATIO, TrainingFreeConfig

SHAPES = {
    f"{layer}.lora_{letter}.default.weight": shape for layer in "pq" for letter, shape in (("A", (2, 6)), ("B", (4, 2)))
}
SENSITIVITY = {"p": 0.5, "q": 50.0}
ROWS = 200


class Losses:
    """A held-out loss that rises with the squared noise of each layer's product, by another factor in every row."""

    def __init__(self, theta: Tensor, sensitivity: dict[str, float]) -> None:
        self.products, self.sensitivity, self.passes = self.products_of(theta), sensitivity, 0
        self.rows = np.random.default_rng(0).normal(1.0, 8.0, ROWS)  # mean 1, standard error .57

    def products_of(self, theta: Tensor) -> dict[str, Tensor]:
        parts = dict(zip(SHAPES, theta.split([12, 8, 12, 8], 1), strict=True))
        tensors = {name: parts[name].unflatten(1, shape) for name, shape in SHAPES.items()}
        return {x: tensors[f"{x}.lora_B.default.weight"] @ tensors[f"{x}.lora_A.default.weight"] for x in "pq"}

    def heldout_by_row(self, theta: Tensor, part: str, *, num_groups: int) -> list[RowScores]:
        assert part == "all"
        self.passes += 1
        found = self.products_of(theta)
        rise = sum(c * (found[x] - self.products[x]).square().mean((1, 2)) for x, c in self.sensitivity.items())
        groups = torch.as_tensor(rise).unflatten(0, (num_groups, -1)).mean(1)
        return [RowScores(1.0 + float(group) * self.rows, np.ones(ROWS, dtype=np.int64)) for group in groups]


def fitted(config: TrainingFreeConfig, sensitivity: dict[str, float] = SENSITIVITY) -> tuple[Any, Losses]:
    theta = torch.randn(1, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = Losses(theta, sensitivity)
    problem = Problem(1.0, FlatPrior(), 1.0, 1, 0, SHAPES, seed=3)
    return config.final_pass(theta, losses, problem), losses


def test_the_scale_is_where_the_rise_reaches_the_tolerance() -> None:
    config = TrainingFreeConfig(tolerance=1.0)
    found, losses = fitted(config)
    (report,) = found.report["training_free"]
    assert losses.passes == report["num_passes"] == MAX_PASSES
    # the mean rise of the rows is 1.5 of its standard errors here, so only the indifference 1e-4 lets a width pass
    ratio = losses.rows.mean() / (losses.rows.std(ddof=1) / ROWS**0.5)
    assert ratio > 1
    assert report["passes"] == (report["difference"] <= 1e-4)
    assert report["scale"] < report["too_wide"]
    wide, _ = fitted(TrainingFreeConfig(tolerance=2 * ratio))
    assert wide.report["training_free"][0]["too_wide"] is None  # every width passes


def test_a_wider_tolerance_or_flatter_loss_has_a_larger_scale() -> None:
    scales = [
        fitted(TrainingFreeConfig(tolerance=0.0), {x: c * factor for x, c in SENSITIVITY.items()})[0].report[
            "training_free"
        ][0]["scale"]
        for factor in (1.0, 1e-2)
    ]
    # the rise is quadratic; a bisection of five steps after two brackets knows a scale to 4^(1/32)
    assert scales[1] / scales[0] == pytest.approx(10, rel=0.25)


def test_members_vary_in_a_alone_and_isotropically() -> None:
    found, _ = fitted(TrainingFreeConfig())
    gaussian = found.approximation
    stds = dict(zip(SHAPES, gaussian.stds[0].split([12, 8, 12, 8]), strict=True))
    assert all(((std > 0).all() if "lora_A" in name else (std == 0).all()) for name, std in stds.items())
    unit = canonical(gaussian.means, SHAPES).unit
    scale = found.report["training_free"][0]["scale"]
    assert torch.allclose(gaussian.stds, scale * unit, rtol=1e-6)


def test_layers_that_matter_less_get_a_larger_scale() -> None:
    found, losses = fitted(TrainingFreeConfig(scales="layer"))
    (report,) = found.report["training_free"]
    assert losses.passes == report["num_passes"] == MAX_PASSES
    p, q = report["scales"].values()
    # rises of 0.5 and 50 for equal noise: scales in the ratio 10; one draw of 12 elements is off by sqrt(2 / 12) / 2
    assert p / q == pytest.approx(10, rel=0.6)
    unit = canonical(found.approximation.means, SHAPES).unit
    ratio = (found.approximation.stds / unit)[0]
    assert ratio[:12].mean() == pytest.approx(p, rel=1e-5)
    assert ratio[20:32].mean() == pytest.approx(q, rel=1e-5)


def test_a_model_that_any_noise_makes_worse_is_reported() -> None:
    with pytest.warns(UserWarning, match="even the narrowest posterior that was tried .* keep the adapter as it is"):
        found, _ = fitted(TrainingFreeConfig(tolerance=0.0), {"p": 1e12, "q": 1e12})
    assert found.report["training_free"][0]["passes"] is False


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scales": "two"}, "scales must be one of one, layer"),
        ({"tolerance": -1.0}, "tolerance must be a finite number >= 0"),
        ({"num_draws": 1}, "num_draws must be an integer >= 2"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainingFreeConfig(**changes)


def test_a_layer_without_effect_or_of_huge_loss_keeps_the_others() -> None:
    theta = torch.randn(1, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theta[:, 12:20] = 0  # the B of p
    problem = Problem(1.0, FlatPrior(), 1.0, 1, 0, SHAPES, seed=3)
    found = TrainingFreeConfig(scales="layer").final_pass(theta, Losses(theta, SENSITIVITY), problem)
    assert (found.approximation.stds[0, :20] == 0).all()
    assert (found.approximation.stds[0, 20:32] > 0).all()
    found, _ = fitted(TrainingFreeConfig(scales="layer", tolerance=0.0), {"p": 1e300, "q": 1.0})
    p, q = found.report["training_free"][0]["scales"].values()
    assert q / p == pytest.approx(WIDEST_RATIO, rel=1e-5)  # p is infinitely sensitive
