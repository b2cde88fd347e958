"""Predictors that run a model once: classifiers and regressions, and language models token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import moved
from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.methods.registry import names_with
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.language.causal_members import CausalMembers, HiddenStates
from hf_bayes.models.prediction.inputs import member_outputs
from hf_bayes.models.predictives import custom as custom_predictives
from hf_bayes.models.predictors import PredictedBy, Predictive
from hf_bayes.models.single_pass.drawn import LEADING_OF_WORDS, rank_for
from hf_bayes.models.single_pass.driver import STRUCTURES, SinglePass, checking_variances, is_sound, naming_modules
from hf_bayes.models.single_pass.gaussian_tensor import GaussianTensor
from hf_bayes.models.single_pass.vocabulary import GaussianWords, word_prediction
from hf_bayes.uncertainty.gaussian_links import LINKS, SINGLE_PASS
from hf_bayes.uncertainty.likelihoods import Categorical, widened


def gaussian_of(model: BayesianModel) -> Gaussian:
    """Return the posterior of a model in the dtype and on the device of its members.

    Raises:
        ValueError: for draws, which are not Gaussian.
    """
    posterior = model.posterior
    if posterior is None or not isinstance(posterior.approximation, Gaussian):
        found = "none" if posterior is None else f"a posterior of {posterior.config.approximation}"
        of_gaussians = names_with(lambda needs: needs.ends_in_gaussian)
        raise ValueError(
            f"a single pass needs a Gaussian posterior, got {found}: fit a Gaussian through the draws "
            f"(docs/single_pass.md), use a method whose posterior is Gaussian ({of_gaussians}), distil the members "
            "into a student, or predict by members"
        )
    return moved(posterior.approximation, model.theta)  # type: ignore[no-any-return]


def factors_of(model: BayesianModel) -> Mapping[str, float]:
    """Return the calibration factors of layers that are stored with the posterior.

    They belong to the single pass, whose temperature is fitted to predictions with them. So they do not depend on
    ``calibrated``, which is about the temperature.
    """
    return {} if model.posterior is None else model.posterior.config.layer_factors


def refuse_rank_without_columns(structure: str, rank: int | None) -> None:
    """Raise if a rank is given to a structure of ``driver.STRUCTURES`` that has no columns to count."""
    if rank is not None and structure in STRUCTURES and structure != "low_rank":
        raise ValueError(
            f"rank is the number of columns of structure='low_rank', got rank={rank!r} with structure={structure!r}, "
            "which has none: leave rank out, or choose structure='low_rank'"
        )


class SinglePassPredictor:
    """Predict from Gaussian outputs of one forward pass for each component of the posterior.

    Args:
        link: from Gaussian logits to probabilities; regressions need none.
        structure: the structure of the covariance of hidden states, one of ``driver.STRUCTURES``.
        rank: the number of columns, of the structure "low_rank" only; None means ``drawn.rank_for``.
        deterministic_scores: True to take queries and keys at their means, as the paper does (eq. 59).
        second_order: True to add the second order in the noise to the mean ("low_rank" only). None adds it there: the
            mean weights are surer than the members, and have less epistemic uncertainty at the same variance.
    Raises:
        ValueError: for an unknown link or structure, a rank without columns, a posterior that is not Gaussian, or a
            module without a rule.
    """

    prediction = SINGLE_PASS
    averages_members = False
    mixes_networks = False
    imitates: PredictedBy | None = None

    def __init__(
        self,
        model: BayesianModel,
        link: str = "bridge",
        structure: str = "low_rank",
        deterministic_scores: bool = False,
        rank: int | None = None,
        second_order: bool | None = None,
    ) -> None:
        if link not in LINKS:
            raise ValueError(f"link must be one of {', '.join(LINKS)}, got {link!r}")
        refuse_rank_without_columns(structure, rank)
        self.link: str | None = link
        gaussian = gaussian_of(model)
        how: dict[str, Any] = {
            "structure": structure, "rank": rank, "deterministic_scores": deterministic_scores,
            "second_order": structure == "low_rank" if second_order is None else second_order,
        }  # fmt: skip
        self.passes = [
            SinglePass(model.members, mean, covariance, factors=factors_of(model), **how)
            for mean, covariance in zip(gaussian.means, gaussian.covariances, strict=True)
        ]
        self._checked = False

    @property
    def paths(self) -> list[str]:
        """The paths of the modules with random weights."""
        return self.passes[0].paths

    def set_factors(self, factors: Mapping[str, float]) -> None:
        """Set the calibration factors of layers."""
        for one in self.passes:
            one.set_factors(factors)

    @contextmanager
    def reusing_passes(self, groups: Sequence[Sequence[str]]) -> Iterator[None]:
        """Do nothing: the covariance of the outputs is not linear in the factors, so each factor takes a pass."""
        yield

    def check_shown(self) -> None:
        """Accept any members, since predictions do not read them."""

    def drawn_outputs(self, model: BayesianModel, inputs: dict[str, Any]) -> Tensor:
        """Return the outputs of the members, which a single pass does not read."""
        return member_outputs(model, inputs)

    def outputs(self, model: BayesianModel, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the means [K, B, ..., C] and the covariances [K, B, ..., C, C] of the outputs."""
        found, moved = [], model.members.padded_rows.moved(inputs)
        inputs = moved.inputs
        for one in self.passes:
            logits = self._run(model, one, inputs)
            if not is_sound(logits.spread):
                with checking_variances(model.model):
                    self._run(model, one, inputs)
            means, covariances = widened(one.mean(logits)), logits.spread.covariance()
            found.append((moved.back(means), moved.back(covariances, num_behind=2)))
        all_means, all_covariances = zip(*found, strict=True)
        return torch.stack(all_means), torch.stack([value.to(all_means[0].dtype) for value in all_covariances])

    def predict(self, model: BayesianModel, inputs: dict[str, Any]) -> Predictive:
        """Return the prediction by Gaussian outputs."""
        means, covariances = self.outputs(model, inputs)
        assert self.link is not None
        link, temperature = self.link, model.mixture_temperature
        return custom_predictives.of_gaussian(means, covariances, model.likelihood, link, temperature)

    def _run(self, model: BayesianModel, one: SinglePass, inputs: dict[str, Any]) -> Any:
        if not self._checked:
            with naming_modules(model.model):
                logits = _logits(model, one, inputs)
            self._checked = True
            return logits
        return _logits(model, one, inputs)


def _logits(model: BayesianModel, one: SinglePass, inputs: dict[str, Any]) -> Any:
    with one.open():
        logits = model.members.forward(inputs).logits
    if not isinstance(logits, GaussianTensor):
        raise ValueError("the random parameters do not reach the outputs in a single pass: predict by members")
    return logits


class SinglePassTokens:
    """Predict the next token from one forward pass; a cache holds the noise of keys and values beside their means.

    Args:
        structure: "low_rank" or "diagonal", of ``driver.STRUCTURES``.
        rank: the number of columns, of the structure "low_rank" only; None means ``drawn.rank_for``, of
            ``LEADING_OF_WORDS``.
        deterministic_scores: True to take queries and keys at their means, as the paper does (eq. 59).
        second_order: as of ``SinglePassPredictor``.
    Raises:
        ValueError: for a rank without columns, a posterior that is not one Gaussian, or a module without a rule.
    """

    prediction = SINGLE_PASS
    link: str | None = None
    averages_members = False
    mixes_networks = False
    imitates: PredictedBy | None = None
    keeps_caches = True
    cuts_feed_forward = False  # its outputs at positions that are not read are padded in place

    def __init__(
        self,
        causal: CausalMembers,
        model: BayesianModel,
        structure: str = "low_rank",
        deterministic_scores: bool = False,
        rank: int | None = None,
        second_order: bool | None = None,
    ) -> None:
        if structure == "full":
            raise ValueError("structure='full' has no language models: choose 'low_rank' or 'diagonal'")
        refuse_rank_without_columns(structure, rank)
        self.causal = causal
        self.has_uncertain_caches = not causal.head.alike
        gaussian = gaussian_of(model)
        if len(gaussian.means) > 1:
            raise ValueError(
                f"the posterior is a mixture of {len(gaussian.means)} Gaussians, and a single pass of a language model "
                "takes one: predict by members, or make one Gaussian of it (posterior.approximation.single())"
            )
        self.mean, (covariance,) = gaussian.means, gaussian.covariances
        self.single = SinglePass(
            model.members, gaussian.means[0], covariance, deterministic_scores=deterministic_scores,
            factors=factors_of(model), structure=structure,
            rank=rank_for(covariance, LEADING_OF_WORDS) if rank is None else rank,
            second_order=structure == "low_rank" if second_order is None else second_order,
        )  # fmt: skip
        # a mean, its columns and its drift, or a mean, a variance and the features of tokens
        self.tensors_per_state = 2 + self.single.rank if structure == "low_rank" else 3
        with evaluating(model), naming_modules(model.model), self.open(model):
            words = torch.zeros(1, 2, dtype=torch.long, device=model.device)
            states = self.causal.hidden(model, {"input_ids": words, "use_cache": False})
            list(self._logits(states, torch.arange(2, device=model.device)))

    @property
    def paths(self) -> list[str]:
        """The paths of the modules with random weights."""
        return self.single.paths

    def set_factors(self, factors: Mapping[str, float]) -> None:
        """Set the calibration factors of layers."""
        self.single.set_factors(factors)

    @contextmanager
    def reusing_passes(self, groups: Sequence[Sequence[str]]) -> Iterator[None]:
        """Do nothing: the covariance of the logits is not linear in the factors, so each factor takes a pass."""
        yield

    def check_shown(self) -> None:
        """Accept any members, since predictions do not read them."""

    def require_members(self, what: str) -> None:
        """Accept generation and scores, whose records come from the single pass."""

    @contextmanager
    def open(self, model: BayesianModel) -> Iterator[None]:
        """Let the model compute moments until the end of the block."""
        self.mean = self.mean.to(model.theta)
        with self.single.open(), model.current_members.restored(), torch.no_grad():
            model.current_members.show(self.mean, model.member_group, model.mixture_temperature)
            yield

    def predict(
        self, model: BayesianModel, states: HiddenStates, positions: Tensor
    ) -> Iterator[tuple[Tensor, Predictive]]:
        """Yield (flat positions [n], the prediction there), a chunk at a time."""
        assert isinstance(model.likelihood, Categorical)
        for index, logits in self._logits(states, positions):
            mean = widened(self.single.mean(logits))
            probs = mean.softmax(-1)
            spread = logits.spread
            variance = spread.variance
            found = word_prediction(mean, variance, spread.times(probs), probs)
            if not is_sound(spread):
                raise ValueError(
                    "variances of logits are not finite in a single pass: the model or its posterior has diverged, or "
                    "the posterior is too wide for float32. Predict by members"
                )
            yield index, GaussianWords(found, model.likelihood, model.mixture_temperature)

    def _logits(self, states: HiddenStates, positions: Tensor) -> Iterator[tuple[Tensor, Any]]:
        for index, logits in self.causal.logits(self.mean, states, positions):
            if not isinstance(logits, GaussianTensor):
                raise ValueError("the random parameters do not reach the logits in a single pass: predict by members")
            yield index, logits[0]
