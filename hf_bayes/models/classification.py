"""Models that classify whole inputs, or regress on them, and the class that all classifiers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_bayes.core.layout import Layout
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.prediction.distilled import DistilledPredictor
from hf_bayes.models.prediction.inputs import InputPredictor, LinearisedPredictor, MemberPredictor, member_outputs
from hf_bayes.models.prediction_mode import predicts
from hf_bayes.models.predictors import MemberLogLik, Reader, Readings
from hf_bayes.models.refusals import refuse_layer_outputs
from hf_bayes.models.single_pass.backward import input_predictor
from hf_bayes.models.text_pairs import GroupCheck, flattened, grouped, holds_groups
from hf_bayes.uncertainty.custom.adapted import Adapted
from hf_bayes.uncertainty.custom.base import CustomLikelihood, LikelihoodConfig
from hf_bayes.uncertainty.custom.registry import likelihood_from
from hf_bayes.uncertainty.likelihoods import Categorical, Likelihood, Normal, refuse_labels
from hf_bayes.uncertainty.several_labels import Bernoulli


def problem_of(config: Any) -> str | None:
    """Return ``problem_type`` of a model's config, or "regression" for one output; None means classes."""
    return getattr(config, "problem_type", None) or ("regression" if config.num_labels == 1 else None)


def refuse_noise_std(noise_std: float | None, kind: str) -> None:
    """Raise a ValueError if noise is given for labels that are not numbers.

    Args:
        kind: the kind of the model, in words.
    """
    if noise_std is not None:
        raise ValueError(
            f"noise_std={noise_std!r} is the standard deviation of a regression's labels, and {kind} has none: leave "
            'noise_std out, or make the head a regression (problem_type="regression")'
        )


@dataclass
class BayesianClassifierOutput(SequenceClassifierOutput):
    """``logits`` [B, ..., C] are the log of the mixture; uncertainties [B, ...] in nats.

    For regression ``logits`` are the predictive mean, and the standard deviations [B, C] of ``Deviations`` stand in
    place of uncertainties. For several labels ``logits`` are the logits of the members' mean probabilities, and the
    uncertainties are sums over the labels (``uncertainty.several_labels``). An uncertainty that a linearised prediction
    does not define is None.
    """

    total: Tensor | None = None
    aleatoric: Tensor | None = None
    epistemic: Tensor | None = None
    predictive_std: Tensor | None = None
    aleatoric_std: Tensor | None = None
    epistemic_std: Tensor | None = None


class BayesianClassifier(BayesianModel):
    """M models as one with ``logits`` [B, ..., C] for ``labels`` [B, ...] (or [B, C]: several labels, numbers)."""

    predictor: InputPredictor

    def __init__(
        self, model: nn.Module, layout: Layout, theta: Tensor, *, trunk: bool = True, noise_std: float | None = None,
        likelihood: LikelihoodConfig | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, layout, theta, trunk=trunk)
        self.predictor = MemberPredictor()
        try:
            of_head = partial(self._choose_likelihood, noise_std)
            self.likelihood = of_head() if likelihood is None else self._build_likelihood(likelihood, noise_std)
        except BaseException:  # a user's likelihood may raise anything, and the model must not stay attached
            self.detach()
            raise
        self.texts_per_row: int = self.likelihood.texts_per_row
        if self.texts_per_row > 1:
            self.check_inputs = GroupCheck(self.core, self.texts_per_row)

    def _choose_likelihood(self, noise_std: float | None) -> Likelihood:
        """Return the likelihood of the problem that transformers reads from the head's configuration."""
        problem = problem_of(self.config)
        if problem == "regression":
            if noise_std is None or not noise_std > 0:
                raise ValueError(
                    "a regression head needs noise_std > 0, the standard deviation of its labels' noise, got "
                    f"{noise_std}: give noise_std; for a trainer, args=BayesianTrainingArguments(noise_std=...). "
                    "Without likelihood=, a trainer learns it from eval_dataset"
                )
            return Normal(noise_std)
        refuse_noise_std(noise_std, f"a {problem or 'classification'} head")
        return Bernoulli() if problem == "multi_label_classification" else Categorical()

    def _build_likelihood(self, config: LikelihoodConfig, noise_std: float | None) -> Likelihood:
        """Return the user's likelihood for the outputs of this head."""
        if not isinstance(config, LikelihoodConfig):
            raise ValueError(
                f"likelihood must be a CustomLikelihood, such as Heteroscedastic(), got {config!r:.100}: "
                "docs/likelihoods.md has the interface"
            )
        if not config.weighs_head:
            refuse_noise_std(noise_std, f"a head with the likelihood {config.name}")
        if isinstance(config, CustomLikelihood):
            return Adapted(config, self.num_outputs)
        return config.build(self.num_outputs, partial(self._choose_likelihood, noise_std))

    def log_lik(
        self, theta: Tensor, inputs: dict[str, Any], *, folded: bool, weights: Tensor | None = None
    ) -> MemberLogLik:
        inputs = dict(inputs)
        labels, members = inputs.pop("labels"), len(theta)
        with self.members.bind(theta), self.members.by_batch_statistics():
            logits = self.outputs(inputs, folded=folded)
            self.members.check_all_read()
        labels = labels.unflatten(0, (members, -1)) if folded else labels.expand(members, *labels.shape)
        self.check_labels(logits, labels)
        is_term = self.likelihood.is_term(labels.flatten(0, 1)).view(members, -1)
        log_prob = self.likelihood.log_prob(logits.flatten(1, -2), labels.flatten(1, logits.ndim - 2))
        if weights is not None:
            parts = self.likelihood.log_prob_parts(logits.flatten(1, -2), labels.flatten(1, logits.ndim - 2))
            log_prob = (parts[is_term].view_as(weights) * weights).sum(-1)
        return MemberLogLik(-log_prob.sum(1), is_term.sum(1))

    def outputs(self, inputs: dict[str, Any], *, folded: bool = False) -> Tensor:
        if self.texts_per_row == 1 or not holds_groups(inputs):
            return super().outputs(inputs, folded=folded)
        return grouped(super().outputs(flattened(inputs), folded=folded), self.texts_per_row)

    def num_positions(self, inputs: dict[str, Any]) -> int:
        if self.texts_per_row > 1 and holds_groups(inputs):
            return self.texts_per_row * super().num_positions(flattened(inputs))
        return super().num_positions(inputs)

    def forward(
        self, labels: Tensor | None = None, *, theta: Tensor | None = None, folded: bool = False, **inputs: Any
    ) -> BayesianClassifierOutput | MemberLogLik | tuple[Any, ...]:
        """Return the mixture of all members; with ``theta``, the members' log-likelihoods for training (``log_lik``).

        Args:
            labels: [B, ...] classes, -100 for none (or [B, C] for multi-label and regression); the loss is the
                mixture's.
            theta: [m, d] members to differentiate.
            folded: True if, with ``theta``, the batch has different rows for each member.
            inputs: inputs of the wrapped model.
        Returns:
            Log-probabilities [B, ..., C] of the mixture with uncertainties [B, ...] in nats. For a regression, means
            [B, C] with standard deviations [B, C] in units of the labels. For several labels, logits [B, C]. With
            ``return_dict=False`` a tuple.
        Raises:
            ValueError: for outputs that have no meaning for a mixture (hidden states, attentions), for inputs that
                ``InputCheck`` refuses, and labels that do not fit.
        """
        refuse_layer_outputs(inputs)
        as_tuple = inputs.pop("return_dict", None) is False
        inputs.pop("num_items_in_batch", None)
        if theta is not None:
            return self.log_lik(theta, {**inputs, "labels": labels}, folded=folded)
        self.check_inputs(inputs)
        output = self._answer(inputs, labels)
        return output.to_tuple() if as_tuple else output

    @predicts
    def _answer(self, inputs: dict[str, Any], labels: Tensor | None) -> BayesianClassifierOutput:
        """Return the output of ``forward`` for the mixture."""
        found = self.predictor.predict(self, inputs)
        loss = None
        if labels is not None:
            self._check_given(found.logits[None], labels)
            loss = found.loss(labels)
        return BayesianClassifierOutput(loss=loss, logits=found.logits, **cast("dict[str, Any]", found.parts))

    @predicts
    def read_predictions(self, inputs: dict[str, Any], read: Reader, *, keep_logits: bool = False) -> Readings:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        self.check_inputs(inputs)
        found = self.predictor.predict(self, inputs)
        self._check_given(found.logits[None], labels)
        return read(found, labels), found.logits if keep_logits else None

    @predicts
    def each_term(self, inputs: dict[str, Any], function: Callable[[Tensor, Tensor], Any]) -> list[Any]:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        logits = self.member_logits(inputs)
        self._check_given(logits, labels)
        terms = self.likelihood.is_term(labels)
        return [function(logits[:, terms], labels[terms])]

    def member_logits(self, inputs: dict[str, Any]) -> Tensor:
        """Return [M, B, ..., C] logits of the current members."""
        return member_outputs(self, inputs)

    @predicts
    def drawn_outputs(self, inputs: dict[str, Any]) -> Tensor:
        """Return [M, B, ..., C], the outputs of the current members; linear in theta if the model is linearised."""
        return self.predictor.drawn_outputs(self, inputs)

    def _predictor_by(self, link: str | None) -> InputPredictor:
        return MemberPredictor() if link is None else LinearisedPredictor(self, link)

    def _student(self) -> InputPredictor:
        return DistilledPredictor(self)

    def _single_pass_predictor(self, **options: Any) -> InputPredictor:
        if self.texts_per_row > 1:
            raise ValueError(
                f"a single pass does not predict by the likelihood {self.likelihood.name}, whose rows have "
                f"{self.texts_per_row} texts: use linearise(), with one backward pass for each reward, or members"
            )
        return input_predictor(self, **options)  # type: ignore[no-any-return]

    @staticmethod
    def settings_of(head: dict[str, Any], likelihood: LikelihoodConfig | None = None) -> dict[str, Any]:
        stored = head.get("likelihood")
        if stored is None and likelihood is not None:
            raise ValueError(
                f"the posterior was trained with the likelihood of its head, got likelihood={likelihood}: leave it out"
            )
        own = None if stored is None else likelihood_from(stored, given=likelihood)
        return {"noise_std": head.get("noise_std"), "likelihood": own}

    def _check_given(self, logits: Tensor, labels: Tensor) -> None:
        """Raise for labels [B, ...] of a wrong shape or value; labels of training rows are checked once, beforehand.

        On an accelerator the process waits for this check, since an index out of range would end the process.
        """
        self.check_labels(logits, labels[None])
        refuse_labels(self.likelihood, labels, self.num_outputs)

    def check_labels(self, logits: Tensor, labels: Tensor) -> None:
        """Raise if labels [M or 1, B, ...] do not have the shape that belongs to logits [M, B, ..., C]."""
        answers, found = tuple(logits.shape[1:]), tuple(labels.shape[1:])
        if found not in (expected := self.likelihood.label_shapes(answers)):
            if not expected:
                raise ValueError(
                    f"labels {list(found)} are given with single texts, whose outputs are rewards: a label of "
                    f"{self.likelihood.name} belongs to a row of {self.texts_per_row} texts, input_ids [rows, "
                    f"{self.texts_per_row}, tokens]. Leave labels out"
                )
            raise ValueError(
                f"labels {list(found)} do not fit the logits {list(answers)} of {type(self.core).__name__}: a "
                f"{self.likelihood.name} likelihood expects {' or '.join(str(list(s)) for s in expected)}. "
                "Check the collator, and problem_type and num_labels of the model"
            )


class BayesianModelForSequenceClassification(BayesianClassifier):
    """M classifiers (or regressors) of sequences as one model with ``logits`` [B, C] for ``labels`` [B]."""

    task = "sequence_classification"
    linearises = True
    auto_class = AutoModelForSequenceClassification
