"""BLoB: a LoRA whose factor A is Gaussian and whose factor B is a point (Wang, Shi, Han, Metaxas and Wang 2024).

    q = N(mean of A, diag std^2) x (a point B),   F(q) = E_q[U] - T H[q of A],   Delta W = B A

So q is a Gaussian of low rank over Delta W with the mean B E[A], and has half as many random numbers as the adapter has
parameters. With noise in both factors, the noise of their product would not be Gaussian. ``mean_field`` minimises F,
with the factors B as its ``points``. Other parameters, such as a classifier, are random.

Departures from the paper. B has its prior, as a penalty. In the paper it has none: B shapes a prior of low rank of the
full weight, so that the KL divergence of the full weight is KL(q(A) || N(0, std^2)), over A alone. Standard deviations
are exp(log std), as in ``mean_field``; in the paper they are G^2, the square of a parameter. The weight of the KL term
is the same in all updates; the paper changes it within an epoch. The paper gives every row of a minibatch signs of its
own for one draw of the noise (flipout), which lowers the variance of the gradient. Here a member is one theta in the
stacked model, for all rows and layers, so that members can be trained, stored and served as adapters. Signs for each
row would need a hook in the forward of every layer. ``mean_field`` lowers the variance by its learned slope instead,
and by antithetic pairs.

The energy of the data depends on the product B A alone, so F is almost flat along (c A, B / c), and with a wide prior
its minimum is far along this valley. So c is computed (``balance``), and only the rest is left to the optimiser. This
changes the way to the optimum, and not the optimum. Without a Gaussian prior around 0 there is no such formula, and the
optimiser works on A and B themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hf_bayes.core.types import UNNAMED, Evaluation, Info, Problem, Rngs, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.methods.variational.balance import Balance, ScaledPrior, balance_of
from hf_bayes.methods.variational.gaussian_vi import ReparametrisedVIConfig
from hf_bayes.methods.variational.mean_field import MeanFieldState, mean_field_rule, mean_field_update
from hf_bayes.methods.variational.points import random_elements

LORA_B = r"\.lora_(embedding_)?B\."
"""The factors B of LoRA."""


@dataclass(frozen=True, kw_only=True)
class BLoBConfig(ReparametrisedVIConfig):
    """Mean-field Gaussian variational inference in which LoRA's factors B are points.

    Attributes:
        points: regular expression on names of random parameters that are learnt as points. None means the factors B of
            LoRA; in an energy over one tensor without names it means nothing, and BLoB is ``mean_field``.
            r"lora_B|classifier" also makes a classifier a point, and "lora_A" exchanges the factors.
    """

    name: ClassVar[str] = "blob"

    def build(self, problem: Problem) -> Rule[Any]:
        if self.points is None and UNNAMED in problem.shapes:  # an energy of your own has no factors
            return mean_field_rule(self, problem, None)
        mask = random_elements(self.name, LORA_B if self.points is None else self.points, problem.shapes)
        assert mask is not None
        rule = mean_field_rule(self, problem, mask)
        balance = balance_of(problem, mask, prior_weight=self.prior_weight, temperature=self.temperature)
        return rule if balance is None else self._balanced(rule, balance, problem, mask)

    def _balanced(
        self, rule: Rule[MeanFieldState], balance: Balance, problem: Problem, mask: Tensor
    ) -> Rule[MeanFieldState]:
        """Return the rule in the coordinates A' and B'. q, and what ``update`` reports, are of A and B."""

        def update(state: MeanFieldState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[MeanFieldState, Info]:
            mean, log_std = state.iterate.unbind(1)
            log_scales = balance.log_scales(mean, (2 * log_std).exp())
            prior = ScaledPrior(problem.prior, balance.scale(log_scales, mean))
            state, info = mean_field_update(self, state, evaluation, lr, problem._replace(prior=prior), mask)
            gain = balance.entropy_gain(log_scales)
            free_energy, std = info["free_energy"] - self.temperature * gain, info["std"] * (gain / mask.sum()).exp()
            return state, {"free_energy": free_energy, "std": std}

        def finish(state: MeanFieldState, draws: Tensor) -> Gaussian:
            scale = balance.scale(balance.log_scales(state.theta, state.variance), state.theta)
            return Gaussian.diagonal(scale * state.theta, scale * state.variance.sqrt() * mask.to(scale))

        return rule._replace(update=update, finish=finish)
