"""Laplace approximation: a Gaussian around each chain's MAP (MacKay 1992; posteriors section 3.1 and app. A.1).

    N(theta*, T (H + tau)^-1),   H the curvature of -log p(D | theta) at theta*, tau the prior's precision

``temper="likelihood"`` gives the covariance (H / T + tau)^-1. A posterior as the prior makes this online Laplace with
one penalty (Huszar 2018; posteriors section 5.2): precisions add up.

The chains run ``map`` (AdamW on U / N) to the end. One pass over the data then computes H (``estimators``,
``accumulators``). Several chains give an equally weighted mixture (Eschenhagen et al. 2021). There is no stationary
law: the approximation is exact if log p(D | theta) is quadratic.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.layout import Layout
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.types import (
    DataPasses,
    Evaluation,
    FinalPassResult,
    Info,
    Problem,
    Rngs,
    Rule,
    locate_at_theta,
)
from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.distributions.covariance import Covariance, LowRank
from hf_bayes.methods.averaging.map import BETA_1, MAPState, begin, descend
from hf_bayes.methods.laplace.distance_to_map import (
    diagonal_warning,
    gradient_norm_in_errors,
    how_far,
    summary,
)
from hf_bayes.methods.laplace.estimators import ESTIMATORS
from hf_bayes.methods.laplace.evidence import SCOPES, Expansion, groups, maximise
from hf_bayes.methods.laplace.fit_checks import check_fits
from hf_bayes.methods.laplace.gradient_estimate import GradientEstimate
from hf_bayes.methods.laplace.heldout_prior import fit_by_heldout, groups_by_expression
from hf_bayes.methods.laplace.noise_std import with_fitted_noise
from hf_bayes.methods.laplace.pass_result import PassResult
from hf_bayes.methods.laplace.prior_precision import (
    ElementwisePrecision,
    PriorPrecision,
    prior_moments,
    temper,
    temper_draws,
)
from hf_bayes.methods.laplace.supported import STRUCTURES, CurvatureSpec


@dataclass(frozen=True, kw_only=True)
class LaplaceConfig(MethodConfig):
    """The Laplace approximation around each chain's MAP. A chain ends in one Gaussian.

    Attributes:
        estimator: "ggn", "ef_sequence", "ef_token" or "hessian". The curvature of an energy of ``sample`` is always
            its Hessian.
        structure: "diagonal", "kronecker", "kronecker_corrected", "low_rank" or "full"; of an energy, "diagonal",
            "low_rank" (by Lanczos, see ``laplace.low_rank_hessian``) or "full". None is "kronecker" (K-FAC) for a model
            whose factors hold at most ``supported.MAX_FACTORS`` numbers, or with ``bias="factor"``. It is "diagonal"
            for any other model, for the estimator "hessian", and for an energy.
        num_samples: number of label draws ("ggn") or random signs ("ef_token") per row. None is exact, and takes a
            backward pass for each term and each output (each class but one). "ggn" is exact in any case where that is
            no more than ``num_samples`` passes (for rows with one number, with one of two classes, or a preference),
            and with the structure "full" no more than 16 passes.
        sharing: "expand" or "reduce": how K-FAC treats positions.
        max_factor: longest side of a Kronecker factor that is not diagonal.
        bias: with K-FAC, "diagonal" keeps the diagonal of a bias's curvature, and "factor" a dense block, the left
            factor of its module (``laplace.kronecker``). With it the evidence is laplace-torch's.
        rank: rank of the structure "low_rank".
        max_rank: with "low_rank" and a low-rank posterior as the prior, the number of directions to keep of the sum;
            the remaining ones become diagonal. None keeps all, which is exact: then the ranks add up.
        momentum: AdamW's beta_1 on the way to the MAP.
        fit_prior: "evidence" replaces ``prior_std`` by the precision with the largest evidence (``laplace.evidence``),
            and "heldout" by the precision whose draws predict held-out rows best (``laplace.heldout_prior``). None
            keeps it. The MAP does not move.
        prior_scope: one fitted precision for the "model", for each "tensor" or for each "element". For the model,
            held-out rows fit one factor of ``prior_std``, or one for each expression of a mapping.
        fit_noise: replace the noise of a regression by the one with the largest evidence at fixed weights
            (``laplace.noise_std``).
        strength: lambda, the factor of H before tau is added. 1 is the Laplace approximation. Above 1, a later fit with
            the result as its prior keeps closer to these data. The MAP does not depend on it.
        check_gradient: compute the gradient at the MAP; with many rows and parameters, from a part of the rows
            (``laplace.gradient_estimate``).
    """

    name: ClassVar[str] = "laplace"
    num_chains: int = 1
    init_jitter: float = 0.0
    estimator: str = "ggn"
    structure: str | None = None
    num_samples: int | None = 1
    sharing: str = "expand"
    max_factor: int = 4096
    bias: str = "diagonal"
    rank: int = 32
    max_rank: int | None = None
    momentum: float = BETA_1
    fit_prior: str | None = None
    prior_scope: str = "model"
    fit_noise: bool = False
    strength: float = 1.0
    check_gradient: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            raise ValueError(
                f"{self.name}: temperature must be > 0, got {self.temperature}: at T = 0 the covariance is 0 and its "
                'mean the MAP. Use method="map"'
            )
        if self.draws_per_chain != 1:
            raise ValueError(
                f"{self.name}: draws_per_chain must be 1, got {self.draws_per_chain!r}: a chain ends in one Gaussian. "
                "Use num_chains for a mixture"
            )
        self._check_choice("prior", self.prior, ("gaussian", "he"))
        self._check_choice("estimator", self.estimator, ESTIMATORS)
        self._check_choice("structure", self.structure, (None, *STRUCTURES))
        self._check_choice("sharing", self.sharing, ("expand", "reduce"))
        if self.fit_prior is not None:
            self._check_choice("fit_prior", self.fit_prior, ("evidence", "heldout"))
        self._check_choice("prior_scope", self.prior_scope, SCOPES)
        if self.num_samples is not None:
            self._check_count("num_samples", self.num_samples, minimum=1)
        for field in ("max_factor", "rank"):
            self._check_count(field, getattr(self, field), minimum=1)
        if self.max_rank is not None:
            self._check_count("max_rank", self.max_rank, minimum=1)
            if self.structure != "low_rank":
                raise ValueError(
                    f"{self.name}: max_rank={self.max_rank} needs structure='low_rank', got {self.structure!r}: only "
                    "low-rank factors grow from episode to episode. Leave it out"
                )
        self._check_number("momentum", self.momentum, minimum=0.0, maximum=1.0)
        self._check_number("strength", self.strength, minimum=0.0, strict=True)
        if self.fit_prior is not None and self.strength != 1:
            raise ValueError(
                f"{self.name}: fit_prior={self.fit_prior!r} needs strength=1, got {self.strength!r}: the "
                "evidence is not defined for data that count several times"
            )
        if self.fit_prior == "heldout" and self.max_rank is not None:
            raise ValueError(
                f"{self.name}: max_rank={self.max_rank} is for a posterior as the prior, which fit_prior='heldout' "
                "would replace: leave one out"
            )
        self._check_flag("fit_noise", self.fit_noise)
        if self.fit_noise:
            self._check_noise()
        self.spec.check()

    def _check_noise(self) -> None:
        if self.fit_prior == "heldout":
            raise ValueError(
                f"{self.name}: fit_noise=True and fit_prior='heldout' do not go together: the noise maximises the "
                "evidence, and the prior another score. Use fit_prior='evidence' or None, or give noise_std"
            )
        if self.temperature != 1 or self.strength != 1:
            raise ValueError(
                f"{self.name}: fit_noise=True needs temperature=1 and strength=1, got {self.temperature:g} and "
                f"{self.strength:g}: the evidence is not defined for a tempered likelihood, or for data that count "
                "several times"
            )
        if self.estimator not in ("ggn", "hessian"):
            raise ValueError(
                f"{self.name}: fit_noise=True needs estimator='ggn' or 'hessian', got {self.estimator!r}: their "
                "curvature is proportional to 1 / noise_std^2, and an empirical Fisher to residuals^2 / noise_std^4"
            )

    @property
    def requirements(self) -> Requirements:
        by_heldout = self.fit_prior == "heldout"
        return Requirements(
            learning_rate="range_test",
            final_pass=True,
            all_chains_in_one_pass=self.fit_noise or by_heldout,
            heldout="none" if not by_heldout else "whole" if self.prior_scope == "model" else "split",
            heldout_setting="fit_prior='heldout'" if by_heldout else "",
            ends_at_map=True,
            predicts_linearised=True,
            fits_prior=self.fit_prior is not None,
            fits_noise=self.fit_noise,
            on_energy=self.spec.on_energy,
            spread_advice="num_samples=None and structure='kronecker' or 'full'",
        )

    @property
    def spec(self) -> CurvatureSpec:
        """The estimator and the structure."""
        fields = ("estimator", "structure", "num_samples", "sharing", "max_factor", "bias", "rank")
        return CurvatureSpec(**{field: getattr(self, field) for field in fields})

    def build(self, problem: Problem) -> Rule[MAPState]:
        check_fits(problem, self.name, fit_prior=self.fit_prior, fit_noise=self.fit_noise)
        # at once, since the pass comes only after all updates
        self.spec.check_size(sum(problem.sizes), problem.likelihood)
        self.spec.check_likelihood(problem.likelihood.lacks)
        fit = _Fit(self, problem)

        def update(state: MAPState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[MAPState, Info]:
            return descend(state, evaluation, problem, lr, momentum=self.momentum, prior_weight=self.prior_weight)

        def finish(state: MAPState, draws: Tensor) -> Draws:
            warnings.warn(
                "laplace made no pass over the data: these are MAP points. Call the rule's final_pass at the end",
                stacklevel=3,
            )
            return Draws.from_chains(draws[:, -1:])

        def final_pass(state: MAPState, draws: Tensor, passes: DataPasses) -> FinalPassResult:
            return fit.final_pass(draws[:, -1], passes)

        return Rule(begin, locate_at_theta, update, finish, final_pass, fits_given_points=True)


class _Fit(NamedTuple):
    """The fit of Gaussians to a run's last points.

    Attributes:
        config: the method.
        problem: the data, likelihood and prior.
    """

    config: LaplaceConfig
    problem: Problem

    def final_pass(self, theta: Tensor, passes: DataPasses) -> FinalPassResult:
        """Return the Gaussian around each row of ``theta`` [M, d] with a report, and warn about diagonal tensors.

        Raises:
            ValueError: for a prior or noise that cannot be fitted, or if H + tau is not positive definite.
        """
        config = self.config
        spec = config.spec.exact_if_cheap(self.problem.likelihood)
        results: list[PassResult] = [passes.curvature(row, spec, gradient=config.check_gradient) for row in theta]
        noise_std, fitted, more = None, None, {}
        if config.fit_noise:
            results, noise_std = self._with_noise(theta, results)
        if config.fit_prior == "heldout":
            fitted, more["heldout_nll"] = self._by_heldout(theta, results, passes)
        covariances, notes = [], []
        for row, found in zip(theta, results, strict=True):
            covariance, note = self._around(row, found, fitted)
            covariances.append(covariance)
            notes.append(note | more)
        # without a structure the diagonal is as good as asked for; its tensors are the same in all chains
        fallbacks = notes[0].get("diagonal", {})
        if config.structure and (words := diagonal_warning(fallbacks, config.structure, self.problem.shapes)):
            warnings.warn(words)
        return FinalPassResult(Gaussian(theta, tuple(covariances)), {"laplace": notes}, noise_std)

    def _with_noise(self, theta: Tensor, results: Sequence[PassResult]) -> tuple[list[PassResult], float]:
        """Return the results under the noise of a regression that maximises the evidence, and this noise."""
        likelihood = self.problem.likelihood
        assert likelihood.noise_std is not None
        assert likelihood.root_columns is not None  # one column for each number of a label

        def expand(number: int, one: PassResult) -> tuple[Expansion, Tensor]:
            expansion, precision = self._expand(theta[number], one)
            return expansion, precision.diagonal

        count = self.problem.num_data * likelihood.root_columns
        return with_fitted_noise(results, expand, noise_std=likelihood.noise_std, count=count)

    def _by_heldout(
        self, theta: Tensor, results: Sequence[PassResult], passes: DataPasses
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the prior precision [d], and a report."""
        config, problem = self
        _, given = prior_moments(problem.prior, theta[0])
        index = groups(config.prior_scope, _layout(problem))
        if config.prior_scope == "model" and config.prior_std_by_expression is not None:
            index = groups_by_expression(list(config.prior_std_by_expression), problem.shapes)

        def deviations(number: int, precision: Tensor, noise: Tensor) -> Tensor:
            curvature = results[number].curvature
            return temper_draws(curvature, precision, noise, temperature=config.temperature, what=config.temper)

        def score(theta: Tensor, part: str, *, gradient: bool) -> tuple[float, Tensor | None]:
            return passes.heldout(theta, part, gradient=gradient)

        split = config.requirements.heldout == "split"
        return fit_by_heldout(theta, given.diagonal, index, deviations, score, split=split, seed=problem.seed)

    @property
    def _power(self) -> float:
        """The exponent of the likelihood."""
        return 1 / self.config.temperature if self.config.temper == "likelihood" else 1.0

    def _gradient(self, found: PassResult) -> GradientEstimate | None:
        """Return the gradient of the tempered log-likelihood."""
        return None if found.gradient is None else found.gradient.scaled(self._power)

    def _expand(self, theta: Tensor, found: PassResult) -> tuple[Expansion, PriorPrecision]:
        """Return the log posterior around ``theta`` [d] and the prior's precision; ``found`` is the pass's result."""
        mean, precision = prior_moments(self.problem.prior, theta)
        expansion = Expansion(found.curvature.scaled(self._power), self._power * found.log_lik, theta - mean)
        if self.config.fit_prior == "evidence":
            with gradient_norm_in_errors(self._gradient(found), precision.grad_log_prior(expansion.offset)):
                fitted = maximise(expansion, precision.diagonal, self.config.prior_scope, _layout(self.problem))
            precision = ElementwisePrecision(fitted)
        return expansion, precision

    def _around(self, theta: Tensor, found: PassResult, fitted: Tensor | None) -> tuple[Covariance, dict[str, Any]]:
        """Return the covariance around one row [d] and its report; ``fitted`` is the precision from held-out rows."""
        config = self.config
        expansion, precision = self._expand(theta, found)
        precision = precision if fitted is None else ElementwisePrecision(fitted)
        note: dict[str, Any] = {"log_lik": found.log_lik}
        if config.fit_prior is not None:
            note["prior_precision"] = summary(precision.diagonal, config.prior_scope, self.problem.sizes)
        curvature = found.curvature.scaled(config.strength)
        gradient, prior_gradient = self._gradient(found), precision.grad_log_prior(expansion.offset)
        with gradient_norm_in_errors(gradient, prior_gradient):
            covariance = temper(curvature, precision, temperature=config.temperature, what=config.temper)
        untempered = 1.0 if config.temper == "likelihood" else config.temperature
        evidence = precision.log_evidence(expansion, covariance, untempered)
        # a flat prior has no evidence, nor do data that count twice
        if config.strength == 1 and bool(evidence.isfinite()):
            note["log_evidence"] = float(evidence)
        if gradient is not None:
            note |= how_far(gradient, prior_gradient, covariance, untempered)
        if found.fallbacks:
            note["diagonal"] = dict(found.fallbacks)
        if config.max_rank is not None:
            assert isinstance(covariance, LowRank)
            covariance = covariance.truncated(config.max_rank)
        return covariance, note


def _layout(problem: Problem) -> Layout:
    return Layout(tuple(problem.shapes), tuple(problem.shapes.values()))
