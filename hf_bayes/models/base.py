"""A Bayesian model that behaves like one ordinary transformers model: its logits are the log of the mixture.

Inside ``forward`` the rows of a batch are folded member-major. A caller passes B rows and gets B rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Self, Unpack, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_bayes.core.layout import Layout
from hf_bayes.members import Members
from hf_bayes.members.inputs import num_positions_of, num_rows_of, take_rows
from hf_bayes.members.locking import CopyableLock
from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.members.quantised import guard
from hf_bayes.models.current_members import CurrentMembers, share_of, stored_temperature, warn_of_lost_temperature
from hf_bayes.models.host_methods import HostMethods
from hf_bayes.models.input_check import InputCheck
from hf_bayes.models.loading.base_model import core_of, num_labels_of, refuse_foreign
from hf_bayes.models.loading.posterior import loaded
from hf_bayes.models.predictors import MemberLogLik, PredictedBy, Predictor, Reader, Readings
from hf_bayes.models.refusals import refuse_distilled, refuse_likelihood, refuse_settings, refuse_theta
from hf_bayes.models.restoration import Restoration
from hf_bayes.posteriors.hub import LOCATION, Location
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.student import DISTILLED
from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.custom.weighted import without_weights
from hf_bayes.uncertainty.gaussian_links import PREDICTIONS, SINGLE_PASS
from hf_bayes.uncertainty.likelihoods import Likelihood, next_tokens


class BayesianModel(HostMethods):
    """Members theta [M, d] of one transformers or peft model. Make one with ``attach`` or ``from_pretrained``.

    Predictions never use dropout. ``train()`` only affects training, which passes ``theta`` to ``forward``.

    Attributes:
        theta: nn.Parameter [M, d], the members; in training, gradients are computed for it.
        layout: the random parameters, side by side in a row of theta.
        predictor: the way in which the model predicts; ``linearise`` replaces it.
        posterior: the posterior that the model was loaded from, if there is one.
        calibrated: whether predictions use the temperature of the mixture that is stored with the posterior.
    """

    model: nn.Module
    likelihood: Likelihood
    predictor: Predictor
    posterior: Posterior | None = None
    calibrated: bool = True
    task: ClassVar[str]
    auto_class: ClassVar[Any]  # of transformers: it loads the base model
    prediction_fields: tuple[str, ...] = ("posterior", "predictor", "calibrated", "likelihood", "members_per_pass")
    """The attributes, besides members, that a trainer or a fit may change: ``PredictionState`` gives them back."""
    term_kind: ClassVar[str] = "outputs"
    """A likelihood term is "outputs" (of a row, or a labelled token), the next "token", or a pair of "answers"."""
    predicts_its_terms: ClassVar[bool] = True  # False: a loaded posterior does not predict these terms, as after DPO
    linearises: ClassVar[bool] = False  # True: loaded Laplace approximations predict linearised (too costly for tokens)
    _student: Callable[[], Predictor]
    _single_pass_predictor: Callable[..., Predictor]

    def __init__(self, model: nn.Module, layout: Layout, theta: Tensor, *, trunk: bool = True) -> None:
        core = core_of(model)
        self.check_core(core)
        refuse_foreign(model, core)
        super().__init__(cast(PreTrainedConfig, core.config))
        self.model, self.layout, self._restoration = model, layout, Restoration(model)
        self.members = Members(model, core, layout, trunk=trunk)
        refuse_theta(layout, theta, self.members.statistics)
        self.members_per_pass: int | None = None
        self.check_inputs, self.current_members, self.lock = InputCheck(core), CurrentMembers(), CopyableLock()
        self.theta = nn.Parameter(theta)
        self.members.install()
        model.requires_grad_(False)  # after ``install``, which may raise and then leaves the model as it was
        self._restoration.handles = guard(model)

    @classmethod
    def check_core(cls, core: nn.Module) -> None:
        """Raise a ValueError for a model that this class has no predictions for."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, directory_or_repo: str | os.PathLike[str] | Posterior, *, members: int | None = None,
        dtype: torch.dtype | str | None = None, device_map: Any = None, trust_remote_code: bool = False,
        base_model: str | os.PathLike[str] | PreTrainedModel | None = None, prediction: str | None = None,
        check_base: bool = True, calibrated: bool = True, likelihood: LikelihoodConfig | None = None,
        **location: Unpack[Location],
    ) -> Self:  # fmt: skip
        """Load a saved posterior on its base model.

        Args:
            directory_or_repo: a posterior directory, a repository of the Hub, or a ``Posterior`` in memory.
            members: number of members, by which the model then predicts; None means all draws, or 10 of a Gaussian.
            dtype: dtype of the base model; None keeps the dtype that the posterior was made with. Members stay float32.
            device_map: as in transformers, onto one device.
            trust_remote_code: given to transformers for the base model; a posterior never brings code.
            base_model: another path or name of the base model, or the model itself; None means the recorded name.
            check_base: True to refuse a base model whose fingerprint differs.
            prediction: "members", "linearised" (by draws), "linearised_probit" or "linearised_bridge" (see
                ``linearise``), "single_pass" (by one forward pass), or "distilled" (by the student of ``distil``). None
                takes "members" if ``members`` is given, else the name stored with the posterior: Laplace approximations
                of classifiers of sequences or images, and of regressions, are linearised.
            calibrated: False to predict without the stored temperature of the mixture, which belongs to the stored way
                of prediction and to all members.
            likelihood: the likelihood that the posterior stores, if its class is not registered.
            location: as in ``Posterior.from_pretrained``; the settings of the download hold for the base model, too.
        Raises:
            ValueError: for a damaged posterior, another task, or another base model; naming what is wrong.
        """
        refuse_settings([name for name in location if name not in LOCATION], cls.auto_class)
        how: dict[str, Any] = {"members": members, "prediction": prediction, "base_model": base_model, "dtype": dtype,
                               "check_base": check_base, "device_map": device_map, "location": location,
                               "trust_remote_code": trust_remote_code}  # fmt: skip
        with loaded(directory_or_repo, cls.task, cls.auto_class, **how) as found, ExitStack() as undo:
            bayesian: Self = cls(*found[:3], **cls.settings_of(found.posterior.config.head, likelihood))
            undo.callback(bayesian.detach)  # the caller does not hold this object, and cannot detach it
            bayesian.use_settings_of(found.posterior)
            bayesian.calibrated = calibrated
            stored = "members" if members is not None else found.posterior.config.prediction
            bayesian.eval().predict_by(stored if prediction is None else prediction)  # type: ignore[no-untyped-call]
            undo.pop_all()
        bayesian._restoration.own_base = found.own_base
        return bayesian

    def use_settings_of(self, posterior: Posterior) -> None:
        """Take all settings other than the members from the posterior that the model is loaded from."""
        self.posterior = posterior

    @staticmethod
    def settings_of(head: dict[str, Any], likelihood: LikelihoodConfig | None = None) -> dict[str, Any]:
        """Return the keyword arguments of this class that the ``head`` of a posterior stores; check the user's."""
        refuse_likelihood(likelihood or head.get("likelihood"), "a language model")
        return {}

    def predict_by(self, prediction: str) -> Self:
        """Set the way of prediction: a name of ``gaussian_links.PREDICTIONS``, or "distilled".

        Raises:
            ValueError: for another name, as ``linearise`` and ``single_pass``, and if there is no student or the model
                holds members.
        """
        if prediction == DISTILLED:
            return self._use(self._student())
        if prediction not in list(PREDICTIONS):  # a list also compares what has no hash
            raise ValueError(f"prediction must be one of {', '.join(PREDICTIONS)}, distilled, got {prediction!r:.100}")
        return self.single_pass() if prediction == SINGLE_PASS else self.linearise(PREDICTIONS[prediction])

    def linearise(self, link: str | None = "monte_carlo") -> Self:
        """Switch to outputs that are linear in theta: f(x, mean) + J (theta - mean) with theta ~ N(mean, V).

        Args:
            link: from Gaussian logits of classes to probabilities, of ``gaussian_links.LINKS``. None means members.
        Raises:
            ValueError: for an unknown link, for a posterior that is not Gaussian, and if the class of the task does not
                support this. The model then predicts as before.
        """
        refuse_distilled(self.predictor)
        return self._use(self._predictor_by(link))

    def single_pass(self, **options: Any) -> Self:
        """Switch to predictions by one forward pass that carries means and variances (docs/single_pass.md).

        Args:
            options: ``structure`` ("backward" for classifiers and regressions, "low_rank", "diagonal", or "full" for
                small models that are no language models), ``rank`` of "backward" or "low_rank",
                ``deterministic_scores`` (queries and keys at their means; not for "backward"), ``second_order`` of
                "low_rank" (means with their drift, the default), for classes and numbers ``link``.
        Raises:
            ValueError: for a posterior that is not Gaussian, or a module without a rule, by its name. The model then
                predicts as before.
        """
        return self._use(self._single_pass_predictor(**options))

    def count_rows_once(self) -> None:
        """Take labels without weights of rows from now on, if the likelihood has them (``Weighted``)."""
        self.likelihood = without_weights(self.likelihood)

    def _use(self, predictor: Predictor) -> Self:
        """Predict by this predictor. Warn if the stored temperature was fitted for another way of prediction."""
        self.predictor = predictor
        warn_of_lost_temperature(self.posterior if self.calibrated else None, predictor.imitates or self.predicted_by)
        return self

    def _predictor_by(self, link: str | None) -> Predictor:
        """Return the predictor for ``link``; None means by members."""
        raise AssertionError("the task's class defines _predictor_by")

    @property
    def is_closed_form(self) -> bool:
        """True if predictions integrate over the Gaussian, independently of a number of members."""
        return not self.predictor.averages_members

    @property
    def current(self) -> Tensor:
        """The members [M, d] that evaluation and generation use."""
        return self.theta if self.current_members.shown is None else self.current_members.shown

    @property
    def num_members(self) -> int:
        """The number M of members that evaluation and generation use in this process."""
        return len(self.current)

    @property
    def predicted_by(self) -> PredictedBy:
        """The way in which evaluation and generation predict, and the number of members in all processes."""
        averaged = self.num_members * self.member_group.size if self.predictor.averages_members else 0
        return PredictedBy(self.predictor.prediction, averaged)

    @property
    def mixture_temperature(self) -> float:
        """The temperature t of the mixture that predictions use (``uncertainty.mixture_temperature``)."""
        shown, own = self.current_members.replacement, self.predictor.imitates or self.predicted_by
        return shown.temperature if shown else stored_temperature(self.posterior if self.calibrated else None, own)

    @property
    def member_group(self) -> LocalMembers:
        """The processes that hold the members which evaluation and generation use."""
        return self.current_members.group

    def show(self, theta: Tensor | None, group: LocalMembers | None = None, temperature: float = 1.0) -> None:
        """Let evaluation and generation use ``theta`` [M', d] instead of the parameter; None ends this.

        Args:
            group: the processes that hold the other members, if ``theta`` has not all.
            temperature: the temperature of their mixture.
        Raises:
            ValueError: if the model was detached, or its predictor cannot take other members.
        """
        if theta is not None:
            self.predictor.check_shown()
        self.members.require_attached()
        self.current_members.show(None if theta is None else theta.to(self.theta.device), group, temperature)

    @contextmanager
    def showing(self, theta: Tensor, group: LocalMembers | None = None, temperature: float = 1.0) -> Iterator[None]:
        """Use ``theta`` until the end of the block, and then the earlier members again."""
        with self.current_members.restored():
            self.show(theta, group, temperature)
            yield

    def spread_members(self, group: Any = None) -> Self:
        """Keep this process's share of theta (``share_of``). From now on all processes must make the same calls."""
        theta, self.current_members.own_group = share_of(self.theta, group)
        self.place(theta)
        return self

    def detach(self) -> nn.Module:
        """Restore the wrapped model exactly as it was: forwards, hooks, values and requires_grad.

        A ``base_model`` of ``from_pretrained`` comes back without the adapter. Predictions, training and ``show`` then
        raise a ValueError; ``theta``, ``layout`` and ``config`` stay readable. A second call changes nothing.
        """
        if self.members.attached:
            self.members.remove()
            self.model = self._restoration.give_back(self.model)
        return self.model

    def __enter__(self) -> BayesianModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    # -- likelihood terms of a batch, defined by the task's class -----------------------------------------------------

    def log_lik(
        self, theta: Tensor, inputs: dict[str, Any], *, folded: bool, weights: Tensor | None = None
    ) -> MemberLogLik:
        """Return the log-likelihood of a batch with ``labels`` for ``theta`` [m, d], differentiable in it.

        Args:
            folded: True if the batch has different rows for each member.
            weights: [m, n, P] of the parts of terms (``log_prob_parts``) of a batch that is not folded; None is 1.
        Returns:
            ``loss`` [m], minus the sum of log-likelihoods in nats, and ``num_terms`` [m].
        Raises:
            ValueError: for labels that do not fit the outputs.
        """
        raise AssertionError("the task's class defines log_lik")

    def evaluate_batch(self, inputs: dict[str, Any], *, keep_logits: bool = False) -> Readings:
        """Return the statistics of a batch with ``labels``.

        Returns:
            [n] tensors, one entry per likelihood term: nll, confidence, correct, brier, total, aleatoric, epistemic of
            the mixture, member_nll (mean over members), member_log_lik [n, P, M] of a term's parts; other likelihoods
            as in ``predictives``. With ``keep_logits`` also the mixture's logits in the shape of the wrapped model's.
        """
        return self.read_predictions(inputs, lambda found, labels: found.statistics(labels), keep_logits=keep_logits)

    def read_predictions(self, inputs: dict[str, Any], read: Reader, *, keep_logits: bool = False) -> Readings:
        """Return what ``read`` makes of the predictions of a batch with ``labels``, joined over the batch.

        Args:
            read: (prediction, labels) -> tensors by name, one entry per likelihood term; called once for the batch, or
                for a few positions at a time if C is a vocabulary.
        """
        raise AssertionError("the task's class defines read_predictions")

    def each_term(self, inputs: dict[str, Any], function: Callable[[Tensor, Tensor], Any]) -> list[Any]:
        """Return the results of ``function`` for the likelihood terms of a batch with ``labels``, in their order.

        Args:
            function: called with the members' logits [M, n, C] and the labels [n] (or [n, C]) of n terms; once for all
                terms, or for a few at a time if C is a vocabulary.
        """
        raise AssertionError("the task's class defines each_term")

    @property
    def num_outputs(self) -> int:
        """The number C of classes, labels or numbers that the head returns."""
        return int(num_labels_of(self.config))

    @property
    def num_root_columns(self) -> int | None:
        """The number of columns of a root of a likelihood term's Fisher information in the outputs; None if unknown."""
        return self.likelihood.num_root_columns(self.num_outputs)

    def terms_per_row(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return [B], the number of likelihood terms in each row of a batch with ``labels`` [B, ...]."""
        labels = inputs["labels"]
        labels = next_tokens(labels, inputs.get("attention_mask")) if self.term_kind == "token" else labels
        return self.likelihood.is_term(labels).reshape(len(labels), -1).sum(1)

    def outputs(self, inputs: dict[str, Any], *, folded: bool = False) -> Tensor:
        """Return [M, B, ..., C], the outputs of the bound members."""
        return self.members.logits(inputs, folded=folded)

    def take_rows(self, inputs: dict[str, Any], index: Tensor) -> dict[str, Any]:
        """Return the rows ``index`` [k] of a batch, in this order; a row may come several times."""
        return take_rows(inputs, index)

    def num_positions(self, inputs: dict[str, Any]) -> int:
        """Return T, the number of positions that a row of a batch takes in the model."""
        return num_positions_of(inputs)

    def passes(self, inputs: dict[str, Any]) -> list[Tensor]:
        """Return the current members in the groups that go through the model together."""
        rows, length = num_rows_of(inputs), self.num_positions(inputs)
        size = self.members_per_pass or self.members.pass_size(self.num_members, rows, length)
        return list(self.members.chunks(self.current, size))
