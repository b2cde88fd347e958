"""M classifiers or regressors as one: of sequences, tokens, images or audio."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForAudioClassification,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_bayes.core.layout import Layout
from hf_bayes.members.trunk import num_positions_of
from hf_bayes.metrics import per_row_statistics
from hf_bayes.models.base import BayesianModel, MemberLogLik, predicts, term_statistics
from hf_bayes.models.linearised import Linearisation, gaussian_outputs, linearisation_of
from hf_bayes.uncertainty.gaussian_links import LINKS, log_density, moments
from hf_bayes.uncertainty.likelihoods import Bernoulli, Categorical, Likelihood, Normal, refuse_labels, widened


def problem_of(config: Any) -> str | None:
    """Return ``problem_type`` of a model's config, or "regression" for one output; None stands for classes."""
    return getattr(config, "problem_type", None) or ("regression" if config.num_labels == 1 else None)


def refuse_noise_std(noise_std: float | None, kind: str) -> None:
    """Raise a ValueError for a noise of labels that are no numbers.

    Args:
        kind: of the model, in words.
    """
    if noise_std is not None:
        raise ValueError(
            f"noise_std={noise_std!r} is the standard deviation of a regression's labels, and {kind} has none: leave "
            'noise_std out, or make the head a regression (problem_type="regression")'
        )


class Deviations(NamedTuple):
    """Standard deviations of a regression's prediction, in units of the labels.

    Attributes:
        predictive_std: of the label, sqrt(noise_std^2 + Var_m f_m): the law of total variance for the mixture.
        epistemic_std: of the members' means, sqrt(Var_m f_m).
    """

    predictive_std: Tensor
    epistemic_std: Tensor


@dataclass
class BayesianClassifierOutput(SequenceClassifierOutput):
    """``logits`` [B, ..., C] are the log of the mixture; uncertainties [B, ...] in nats.

    For regression ``logits`` are the predictive mean, with the standard deviations [B, C] of ``Deviations`` in place of
    uncertainties; for labels of their own (multi-label) the logits of the members' mean probabilities, and neither. An
    uncertainty that a linearised prediction does not define is None.
    """

    total: Tensor | None = None
    aleatoric: Tensor | None = None
    epistemic: Tensor | None = None
    predictive_std: Tensor | None = None
    epistemic_std: Tensor | None = None


class BayesianClassifier(BayesianModel):
    """M models as one whose ``logits`` [B, ..., C] answer ``labels`` [B, ...] (or [B, C]: several labels, numbers)."""

    _linearised: Linearisation | None = None

    def __init__(
        self, model: nn.Module, layout: Layout, theta: Tensor, *, trunk: bool = True, noise_std: float | None = None
    ) -> None:
        super().__init__(model, layout, theta, trunk=trunk)
        try:
            self.likelihood = self._choose_likelihood(noise_std)
        except ValueError:
            self.detach()
            raise

    def _choose_likelihood(self, noise_std: float | None) -> Likelihood:
        """Return the likelihood of what transformers takes the head for."""
        problem = problem_of(self.config)
        if problem == "regression":
            if noise_std is None or not noise_std > 0:
                raise ValueError(
                    "a regression head needs noise_std > 0, the standard deviation of its labels' noise, got "
                    f"{noise_std}: give noise_std, or set BayesianTrainingArguments(noise_std=...)"
                )
            return Normal(noise_std)
        refuse_noise_std(noise_std, f"a {problem or 'classification'} head")
        return Bernoulli() if problem == "multi_label_classification" else Categorical()

    def log_lik(
        self, theta: Tensor, inputs: dict[str, Any], *, folded: bool, weights: Tensor | None = None
    ) -> MemberLogLik:
        inputs = dict(inputs)
        labels, members = inputs.pop("labels"), len(theta)
        with self.members.bind(theta):
            logits = self.members.logits(inputs, folded=folded)
            self.members.check_all_read()
        labels = labels.unflatten(0, (members, -1)) if folded else labels.expand(members, *labels.shape)
        self.check_labels(logits, labels)
        is_term = self.likelihood.is_term(labels.flatten(0, 1)).view(members, -1)
        log_prob = self.likelihood.log_prob(logits.flatten(1, -2), labels.flatten(1, logits.ndim - 2))
        if weights is not None:
            log_prob = log_prob[is_term].view(members, -1) * weights
        return MemberLogLik(-log_prob.sum(1), is_term.sum(1))

    def forward(
        self, labels: Tensor | None = None, *, theta: Tensor | None = None, folded: bool = False, **inputs: Any
    ) -> BayesianClassifierOutput | MemberLogLik:
        """The mixture of all members; with ``theta``, what training needs of them instead (``log_lik``).

        Args:
            labels: [B, ...] classes, -100 for none (or [B, C] for multi-label and regression); the loss is that of
                the mixture.
            theta: [m, d] members to differentiate.
            folded: with ``theta``: the batch holds other rows for each member.
            inputs: what the wrapped model takes.
        Raises:
            ValueError: for inputs that ``InputCheck`` refuses, and labels that do not fit.
        """
        for name in ("return_dict", "num_items_in_batch", "output_hidden_states", "output_attentions"):
            inputs.pop(name, None)
        if theta is not None:
            return self.log_lik(theta, {**inputs, "labels": labels}, folded=folded)
        self.check_inputs(inputs)
        return self._answer(inputs, labels)

    @predicts
    def _answer(self, inputs: dict[str, Any], labels: Tensor | None) -> BayesianClassifierOutput:
        """``forward`` of the mixture."""
        if self._linearised is not None:
            answers, parts, nll = self._predict_linearised(inputs, labels)
            return BayesianClassifierOutput(loss=None if nll is None else nll.mean(), logits=answers, **parts)
        logits = self._member_logits(inputs)
        loss = None
        if labels is not None:
            self._check_given(logits, labels)
            terms = self.likelihood.is_term(labels)
            loss = self._mixture_nll(logits[:, terms], labels[terms]).sum() / terms.sum().clamp_min(1)
        if isinstance(self.likelihood, Categorical):
            prediction = self.spread.predict(logits)
            return BayesianClassifierOutput(loss=loss, logits=prediction.log_probs, **prediction.uncertainty._asdict())
        return BayesianClassifierOutput(loss=loss, logits=self._mean(logits), **self._deviations(logits))

    @predicts
    def evaluate_batch(
        self, inputs: dict[str, Any], *, keep_logits: bool = False
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        self.check_inputs(inputs)
        if self._linearised is not None:
            return self._evaluate_linearised(inputs, labels, keep_logits)
        logits = self._member_logits(inputs)
        self._check_given(logits, labels)
        if isinstance(self.likelihood, Categorical):
            prediction = self.spread.predict(logits)
            statistics, mixture = term_statistics(prediction, logits, labels, self.spread), prediction.log_probs
        else:
            mixture = self._mean(logits)
            per_member = self.likelihood.log_prob(logits, labels.expand(len(logits), *labels.shape))
            statistics = {
                "nll": -self.spread.log_mean_exp(per_member),
                "member_nll": -self.spread.mean(per_member),
                "member_log_lik": self.spread.every(per_member).T,
            }
            if deviations := self._deviations(logits):
                squares = (mixture - labels.to(mixture.dtype).reshape(mixture.shape)).square()
                covered = (squares.sqrt() <= deviations["predictive_std"]).to(mixture.dtype)
                numbers = {"mse": squares, "covered": covered, **deviations}
                statistics |= {name: value.mean(-1) for name, value in numbers.items()}
        return statistics, mixture if keep_logits else None

    @predicts
    def each_term(self, inputs: dict[str, Any], function: Callable[[Tensor, Tensor], Any]) -> list[Any]:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        logits = self._member_logits(inputs)
        self._check_given(logits, labels)
        terms = self.likelihood.is_term(labels)
        return [function(logits[:, terms], labels[terms])]

    def linearise(self, link: str | None = "monte_carlo") -> Self:
        """From now on predict by outputs that are linear in theta, N(f(x, mean), J V J'), in place of members.

        Args:
            link: from Gaussian logits to probabilities, of ``predictive.LINKS``; regressions need none. None goes back
                to members.
        Raises:
            ValueError: for another link, or a posterior that is no Gaussian.
        """
        self._linearised = None if link is None else linearisation_of(self, link)
        return self

    def _predict_linearised(
        self, inputs: dict[str, Any], labels: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """[B, ..., C] answers as ``forward`` gives them, uncertainties or deviations by name, and the terms' NLL [n].

        The NLL of several labels adds up those of each, whose dependence through the weights is left out.
        """
        assert self._linearised is not None
        link = LINKS[self._linearised.link]
        mean, covariance = gaussian_outputs(self, self._linearised.gaussian_at(self.theta), inputs)
        if labels is not None:
            self._check_given(mean, labels)
        if isinstance(self.likelihood, Normal):
            noise = self.likelihood.noise_std
            center, variance = moments(mean, covariance)
            deviations = Deviations((variance + noise**2).sqrt(), variance.sqrt())._asdict()
            numbers = None if labels is None else labels.to(mean).reshape(center.shape)
            return center, deviations, None if numbers is None else -log_density(numbers, mean, covariance, noise)
        if isinstance(self.likelihood, Bernoulli):  # a label is a choice between 0 and z
            variance = covariance if covariance.ndim == mean.ndim else covariance.diagonal(dim1=-2, dim2=-1)
            none = torch.zeros_like(mean)
            no, yes = link(torch.stack([none, mean], -1), torch.stack([none, variance], -1)).log_probs.unbind(-1)
            logits = yes - no
            return logits, {}, None if labels is None else -self.likelihood.log_prob(logits[None], labels[None])[0]
        prediction = link(mean, covariance)
        nll = None
        if labels is not None:
            terms = self.likelihood.is_term(labels)
            nll = -self.likelihood.log_prob(prediction.log_probs[None, terms], labels[None, terms])[0]
        return prediction.log_probs, prediction.uncertainties, nll

    def _evaluate_linearised(
        self, inputs: dict[str, Any], labels: Tensor, keep_logits: bool
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """What ``evaluate_batch`` returns, without the NLL of members, of which there are none."""
        answers, parts, nll = self._predict_linearised(inputs, labels)
        assert nll is not None
        if isinstance(self.likelihood, Bernoulli):
            statistics = {"nll": nll}
        elif isinstance(self.likelihood, Normal):
            squares = (answers - labels.to(answers).reshape(answers.shape)).square()
            statistics = {"nll": nll} | {name: v.mean(-1) for name, v in {"mse": squares, **parts}.items()}
        else:
            terms = self.likelihood.is_term(labels)
            statistics = per_row_statistics(answers[terms], labels[terms])
            statistics |= {name: value[terms] for name, value in parts.items()}
        return statistics, answers if keep_logits else None

    @staticmethod
    def settings_of(head: dict[str, Any]) -> dict[str, Any]:
        return {"noise_std": head.get("noise_std")}

    def _member_logits(self, inputs: dict[str, Any]) -> Tensor:
        """[M, B, ..., C]"""
        pieces = []
        with self.members.trunk.once():
            for theta in self.passes(inputs):
                with self.members.bind(theta):
                    pieces.append(self.members.logits(inputs))
        return torch.cat(pieces)

    def _check_given(self, logits: Tensor, labels: Tensor) -> None:
        """Raise for labels [B, ...] that nobody has looked through: those of training rows have been, once and for all.

        On an accelerator the process waits for the answer: an index out of range would end it.
        """
        self.check_labels(logits, labels[None])
        refuse_labels(self.likelihood, labels, self.num_outputs)

    def check_labels(self, logits: Tensor, labels: Tensor) -> None:
        """Raise where labels [M or 1, B, ...] do not answer logits [M, B, ..., C]."""
        answers, found = tuple(logits.shape[1:]), tuple(labels.shape[1:])
        if found not in (expected := self.likelihood.label_shapes(answers)):
            raise ValueError(
                f"labels {list(found)} do not fit the logits {list(answers)} of {type(self.core).__name__}: a "
                f"{type(self.likelihood).__name__} likelihood expects {' or '.join(str(list(s)) for s in expected)}. "
                "Check the collator, and problem_type and num_labels of the model"
            )

    def _mean(self, logits: Tensor) -> Tensor:
        """[M, B, C] -> [B, C]: the members' mean, and of labels of their own the logits of their mean probabilities."""
        logits = widened(logits)
        if not isinstance(self.likelihood, Bernoulli):
            return self.spread.mean(logits)
        # as logarithms, since a probability rounds to 1
        yes, no = (self.spread.log_mean_exp(nn.functional.logsigmoid(sign * logits)) for sign in (1, -1))
        return yes - no

    def _deviations(self, logits: Tensor) -> dict[str, Tensor]:
        """[M, B, C] -> the fields of ``Deviations``, [B, C] each; nothing where the labels are no numbers."""
        if not isinstance(self.likelihood, Normal):
            return {}
        epistemic = self.spread.mean((widened(logits) - self._mean(logits)).square())
        return Deviations((epistemic + self.likelihood.noise_std**2).sqrt(), epistemic.sqrt())._asdict()

    def _mixture_nll(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[N]: -log mean_m p_m(label), of logits [M, N, C]."""
        per_member = self.likelihood.log_prob(logits, labels.expand(len(logits), *labels.shape))
        return -self.spread.log_mean_exp(per_member)


class BayesianModelForSequenceClassification(BayesianClassifier):
    """M classifiers (or regressors) of sequences as one: ``logits`` [B, C] answer ``labels`` [B]."""

    task = "sequence_classification"
    linearises = True
    auto_class = AutoModelForSequenceClassification


class BayesianModelForTokenClassification(BayesianClassifier):
    """M taggers as one: ``logits`` [B, T, C] answer ``labels`` [B, T], -100 for none. No causal shift."""

    task = "token_classification"
    auto_class = AutoModelForTokenClassification

    def _choose_likelihood(self, noise_std: float | None) -> Likelihood:
        """Classes, whatever ``problem_type`` says: transformers' heads of this kind know no other loss."""
        refuse_noise_std(noise_std, "a token classification head")
        return Categorical()


class BayesianModelForImageClassification(BayesianClassifier):
    """M classifiers of images as one: ``pixel_values`` [B, channels, height, width]."""

    task = "image_classification"
    linearises = True
    auto_class = AutoModelForImageClassification

    def num_positions(self, inputs: dict[str, Any]) -> int:
        """Patches of an image, as many as ViT makes of it: not its channels."""
        pixels, patch = inputs.get("pixel_values"), getattr(self.config, "patch_size", 16)
        if pixels is None or not isinstance(patch, int):
            return num_positions_of(inputs)
        return 1 + pixels.shape[-2] * pixels.shape[-1] // patch**2


class BayesianModelForAudioClassification(BayesianClassifier):
    """M classifiers of audio as one: ``input_values`` [B, samples] or ``input_features`` [B, ...] of spectrograms."""

    task = "audio_classification"
    auto_class = AutoModelForAudioClassification

    def num_positions(self, inputs: dict[str, Any]) -> int:
        """Frames that the transformer layers read, fewer than samples."""
        frames: Any = getattr(self.core, "_get_feat_extract_output_lengths", None)
        samples = num_positions_of(inputs)
        values = inputs.get("input_values")
        if frames is None or not isinstance(values, Tensor) or values.ndim != 2:
            return samples
        return max(1, int(frames(torch.tensor(samples))))
