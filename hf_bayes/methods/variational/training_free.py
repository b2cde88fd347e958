"""Training-free Bayesianisation: a Gaussian around a finished LoRA (Shi, Wang, Han, Zhang and Wang 2024).

    B = U diag(s) V',    B' = U diag(s),    A' = V' A,    q = N(A', diag(sigma / s_i)^2 for row i),    B' a point

So q is isotropic in the coordinates E of B A + U E (``lora_coordinates``). sigma is the largest scale at which the loss
of the mixture of draws on held-out rows is within a tolerance of the loss of the weights alone. There is no gradient,
no stationary law, and no use of training rows: sigma says how far the weights can move before held-out rows notice.

The family and the SVD are those of the paper; the search is not. In the paper the metric may change by a fixed share,
up or down: 0.3 % of the NLL, or 1 % of the accuracy. Its anchor rows may be training rows, or rows that the model
itself labelled. Here the rows are held out, only a rise counts, and the tolerance is a number of standard errors of the
difference, paired by row. All scales share the same draws of E. So the tolerance shrinks as 1 / sqrt(rows), and the
draws are those by which a loaded posterior predicts.

In the paper all layers share one scale. With ``scales="layer"`` layer l has the scale sigma f_l. Let c_l be the rise of
the loss by noise in layer l alone, measured in one pass, and n_l the number of its random elements. Then f_l^2 is
proportional to n_l / c_l: to second order these scales have the largest entropy for a given rise.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.requirements import Requirements
from hf_bayes.core.rng import generator
from hf_bayes.core.types import DataPasses, FinalPassResult, Problem, RowScores, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.variational.lora_coordinates import Coordinates, canonical
from hf_bayes.methods.variational.width_search import WidthCheck, check_width, largest_width

MAX_PASSES = 8
"""Passes over the held-out rows, including one of the weights alone and one that compares the layers."""

LEAST_ROWS = 20
"""The least number of held-out rows: with fewer, a standard error means little."""

WIDEST_RATIO = 16.0
"""The largest ratio of a layer's scale to the common one, either way: a measured rise may be close to 0."""


@dataclass(frozen=True, kw_only=True)
class TrainingFreeConfig(MAPConfig):
    """The MAP estimate of a LoRA, with a Gaussian around it that held-out rows determine.

    Attributes:
        scales: "one" scale of the noise for all layers, or one for each "layer".
        tolerance: the largest rise of the held-out loss, in standard errors of the difference, paired by row.
        num_draws: the draws by which a scale is judged. 10 is also the number by which a loaded posterior predicts.
    """

    name: ClassVar[str] = "training_free"
    scales: Literal["one", "layer"] = "one"
    tolerance: float = 1.0
    num_draws: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("scales", self.scales, ("one", "layer"))
        self._check_number("tolerance", self.tolerance, minimum=0.0)
        self._check_count("num_draws", self.num_draws, minimum=2)

    @property
    def requirements(self) -> Requirements:
        return replace(
            super().requirements,
            final_pass=True,
            all_chains_in_one_pass=True,
            heldout="whole",
            heldout_setting=f"method={self.name!r}",
            least_heldout=LEAST_ROWS,
        )

    def build(self, problem: Problem) -> Rule[Any]:
        rule = super().build(problem)

        def final_pass(state: Any, draws: Tensor, passes: DataPasses) -> FinalPassResult:
            return self.final_pass(draws[:, -1], passes, problem)

        return rule._replace(final_pass=final_pass, fits_given_points=True)

    def final_pass(self, theta: Tensor, passes: DataPasses, problem: Problem) -> FinalPassResult:
        """Return the Gaussians around the rows of ``theta`` [M, d], and a report.

        Raises:
            ValueError: as ``canonical``.
        """
        found = canonical(theta.cpu(), problem.shapes)
        search = _Search(self, found, passes, problem.seed)
        factors, num_passes = torch.ones(len(found.layers)), 1
        if self.scales == "layer" and len(found.layers) > 1:
            factors, num_passes = search.factors(), 2
        at = partial(search.gaussian, factors)
        point = search.scores(found.theta)[0]

        def check(width: float) -> WidthCheck:
            return check_width(width, search.at(at(width)), point, tolerance=self.tolerance)

        checks = largest_width(check, found.scale, num_checks=MAX_PASSES - num_passes)
        passed = [one for one in checks if one.passes]
        best = max(passed) if passed else min(checks)
        if not passed:
            warnings.warn(
                f"training_free: even the narrowest posterior that was tried (scale {best.width:.3g}) predicts "
                f"held-out rows worse than its weights alone, by {best.difference:.3g} nats (standard error "
                f"{best.std_error:.2g}): keep the adapter as it is, or give other rows"
            )
        report: dict[str, Any] = {
            "scale": best.width,
            "too_wide": min((one.width for one in checks if not one.passes), default=None),
            "passes": bool(passed),
            "loss": float(point.nll.sum() / point.terms.sum()),
            "difference": best.difference,
            "std_error": best.std_error,
            "rows": len(point.terms),
            "num_passes": len(checks) + num_passes,
        }
        if self.scales == "layer":
            report["scales"] = dict(zip(found.layers, (best.width * factors).tolist(), strict=True))
        return FinalPassResult(at(best.width), {self.name: [report for _ in theta]})


class _Search(NamedTuple):
    """The scores of draws on held-out rows.

    Attributes:
        config: the method.
        coordinates: the weights and the noise of A' at sigma = 1.
        passes: the passes over held-out rows.
        seed: the seed of a posterior's members.
    """

    config: TrainingFreeConfig
    coordinates: Coordinates
    passes: DataPasses
    seed: int

    def gaussian(self, factors: Tensor, width: float) -> Gaussian:
        """Return the Gaussians at a scale, with a factor of it for each layer [L]."""
        return Gaussian.diagonal(self.coordinates.theta, width * self._by_layer(factors) * self.coordinates.unit)

    def at(self, gaussian: Gaussian) -> RowScores:
        """Return the scores of a posterior's members. They are the same draws of E at every scale."""
        # as a posterior draws its members when it is loaded
        members = gaussian.sample(self.config.num_draws, torch.Generator().manual_seed(self.seed))
        return self.scores(members)[0]

    def scores(self, theta: Tensor, num_groups: int = 1) -> list[RowScores]:
        """Return the scores of groups of draws [M, d]."""
        return self.passes.heldout_by_row(theta, "all", num_groups=num_groups)

    def factors(self) -> Tensor:
        """Return the ratios f_l [L] of the layers' scales to the common one, with a geometric mean of 1.

        The noise of a layer is drawn once, with both signs: the rise has no part that is linear in it.
        """
        theta, unit, layer, layers, scale = self.coordinates
        noise = torch.randn(theta.shape[1], dtype=theta.dtype, generator=generator(self.seed, "layers"))
        pairs = [theta[:1].expand(2, -1)]
        for number in range(len(layers)):
            delta = scale * torch.where(layer == number, unit[0] * noise, 0.0)
            pairs.append(torch.stack([theta[0] + delta, theta[0] - delta]))
        point, *alone = self.scores(torch.cat(pairs), len(pairs))
        checks = [check_width(scale, found, point, tolerance=0.0) for found in alone]
        # a rise below its standard error counts as one standard error
        rises = torch.tensor([max(check.difference, check.std_error, 1e-12) for check in checks])
        sizes = torch.tensor([int((unit[0][layer == number] > 0).sum()) for number in range(len(layers))])
        logs = 0.5 * (sizes.log() - rises.log())
        logs = torch.where(sizes > 0, logs, torch.nan)  # B is 0: no noise has an effect
        finite = logs[logs.isfinite()]
        logs = (logs - (finite.mean() if len(finite) else 0.0)).nan_to_num(nan=0.0)
        limit = math.log(WIDEST_RATIO)
        return logs.clamp(-limit, limit).exp()

    def _by_layer(self, factors: Tensor) -> Tensor:
        """Return the factor of each element [d]; 0 where it belongs to no layer."""
        layer = self.coordinates.layer
        return torch.where(layer >= 0, factors.to(self.coordinates.unit)[layer], 0.0)
