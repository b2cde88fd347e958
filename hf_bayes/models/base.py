"""A Bayesian model that behaves like one ordinary transformers model: its logits are the log of the mixture.

Rows of a batch are folded member-major inside ``forward``; ``generate``, stock pipelines and ``Trainer.evaluate`` see
B rows in and B rows out.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_bayes.core.layout import Layout
from hf_bayes.distributed.member_sums import LocalMembers, SpreadMembers
from hf_bayes.members import Members
from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.members.locking import Turns
from hf_bayes.members.quantised import guard
from hf_bayes.members.trunk import num_positions_of, num_rows_of
from hf_bayes.models.base_model import refuse_foreign
from hf_bayes.models.input_check import InputCheck
from hf_bayes.models.loading import load
from hf_bayes.models.predictors import Predictor
from hf_bayes.models.restoration import GradientFlags, Restoration
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.uncertainty.gaussian_links import PREDICTIONS
from hf_bayes.uncertainty.likelihoods import Likelihood, next_tokens

COMPILE_LAYERS = "for layer in model.core.model.layers: layer.compile()"

Predicting = TypeVar("Predicting", bound=Callable[..., Any])


def predicts(method: Predicting) -> Predicting:
    """Of a model's method that predicts: nothing is dropped out in it, in training mode neither.

    A trainer leaves its model in training mode, as transformers' own does. What is predicted there would be random, of
    weights that are no member's, and its spread no uncertainty about the weights.

    Threads wait for each other, also for a whole ``generate``: what one of them binds, the other would read.
    """

    @functools.wraps(method)
    def predicting(self: BayesianModel, *args: Any, **kwargs: Any) -> Any:
        self.members.require_attached()
        with self.turns, nullcontext() if not self.training else evaluating(self):
            return method(self, *args, **kwargs)

    return cast(Predicting, predicting)


class MemberLogLik(NamedTuple):
    """What training needs of a batch: sums over its terms, per member.

    Attributes:
        loss: [M] minus the sum of log-likelihoods in nats, differentiable.
        num_terms: [M] number of terms.
    """

    loss: Tensor
    num_terms: Tensor


class BayesianModel(PreTrainedModel):
    """Members theta [M, d] of one transformers or peft model. Make one with ``attach`` or ``from_pretrained``.

    ``train()`` and ``eval()`` are for training, which hands ``theta`` to ``forward``: whatever predicts has no dropout
    in either mode.

    Attributes:
        theta: nn.Parameter [M, d], the members (in training: where the gradient of each chain is wanted).
        layout: the random parameters, side by side in a row of theta.
    """

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    likelihood: Likelihood
    task: ClassVar[str]
    shifts_labels: ClassVar[bool] = False
    """Whether the label of a position is that of the next token."""
    linearises: ClassVar[bool] = False
    """Return whether a Laplace approximation of the model predicts linearised when it is loaded.

    Not taggers, of which each position takes a backward pass for every label, and not language models, whose generation
    would lose its cache: both can be asked for it.
    """
    auto_class: ClassVar[Any]
    """What loads the base model."""
    posterior: Posterior | None = None
    """What the model was loaded from."""
    predictor: Predictor
    """How the model predicts; ``linearise`` exchanges it."""

    def __init__(self, model: nn.Module, layout: Layout, theta: Tensor, *, trunk: bool = True) -> None:
        core = model.get_base_model() if isinstance(model, PeftModel) else model
        refuse_foreign(model, core)
        _refuse_members(layout, theta)
        super().__init__(core.config)
        self.model, self.layout = model, layout
        self._restoration = Restoration(model)
        self.members = Members(model, core, layout, trunk=trunk)
        self.members_per_pass: int | None = None
        self.check_inputs = InputCheck(core)
        self._shown: Tensor | None = None
        self._spread = self._spread_of_shown = LocalMembers()
        self.turns = Turns()
        self.theta = nn.Parameter(theta)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.members.install()
        self._restoration.handles = guard(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _refuse_compiling()
        return super().__call__(*args, **kwargs)

    # -- being a model ------------------------------------------------------------------------------------------

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' own hook: the core has settled which attention runs, and the config is the core's."""
        return attn_implementation

    def _check_and_adjust_experts_implementation(self, experts_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        return experts_implementation

    @property
    def core(self) -> PreTrainedModel:
        """The transformers model inside."""
        return self.members.core

    @property
    def num_members(self) -> int:
        """M, of what evaluation and generation see."""
        return len(self.current)

    @property
    def current(self) -> Tensor:
        """[M, d]: the members that evaluation and generation see."""
        return self.theta if self._shown is None else self._shown

    @property
    def is_showing(self) -> bool:
        """True between ``show(theta)`` and ``show(None)``."""
        return self._shown is not None

    @property
    def device(self) -> torch.device:
        return self.theta.device

    @property
    def dtype(self) -> torch.dtype:
        return self.core.dtype

    def show(self, theta: Tensor | None, spread: LocalMembers | None = None) -> None:
        """Let evaluation and generation see ``theta`` [M', d] in place of the parameter; None ends it.

        Args:
            spread: where the other members are, if these are not all.
        Raises:
            ValueError: if the model was detached, or its predictor cannot take other members.
        """
        if theta is not None:
            self.predictor.check_shown()
        self._exchange(theta, spread)

    def _exchange(self, theta: Tensor | None, spread: LocalMembers | None) -> None:
        self.members.require_attached()
        self._shown = None if theta is None else theta.to(self.theta.device)
        self._spread_of_shown = spread or LocalMembers()

    @contextmanager
    def showing(self, theta: Tensor, spread: LocalMembers | None = None) -> Iterator[None]:
        """Show ``theta`` until the end of the block; then the model sees what it saw before."""
        self.predictor.check_shown()
        with self.exchanging(theta, spread):
            yield

    @contextmanager
    def exchanging(self, theta: Tensor, spread: LocalMembers | None = None) -> Iterator[None]:
        """Do the same for a predictor, which is not asked whether it can take ``theta``."""
        before = self._shown, self._spread_of_shown
        self._exchange(theta, spread)
        try:
            yield
        finally:
            self._shown, self._spread_of_shown = before

    @property
    def spread(self) -> LocalMembers:
        """Where the members are that evaluation and generation see."""
        return self._spread if self._shown is None else self._spread_of_shown

    def spread_members(self, group: Any = None) -> Self:
        """Keep this process's share of theta. From now on all processes of ``group`` must be asked the same together.

        Args:
            group: a process group; None means all processes.
        Raises:
            ValueError: if the members cannot be dealt out evenly, or this process was not launched with others.
        """
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise ValueError(
                "members are spread over the processes of a launch, and this one has no process group: start it with "
                "accelerate launch or torchrun, and make an accelerate PartialState() first"
            )
        spread = SpreadMembers(group)
        if len(self.theta) % spread.size:
            raise ValueError(
                f"{len(self.theta)} members cannot be dealt to {spread.size} processes evenly: load another number of "
                "members"
            )
        self.theta = nn.Parameter(self.theta.detach().chunk(spread.size)[spread.rank].clone())
        self._spread = spread
        return self

    def _apply(self, fn: Callable, recurse: bool = True) -> Self:
        """torch's own hook of ``to``, ``half``, ``bfloat16`` ...: the base changes dtype, members are never narrowed.

        bfloat16 would round the noise of the chains away, and differences between members with it.
        """
        before = self.theta.data
        super()._apply(fn, recurse)
        if self.theta.dtype.itemsize < before.dtype.itemsize:
            self.theta.data = before.to(self.theta.device)
        return self

    def detach(self) -> nn.Module:
        """Give the wrapped model back exactly as it was: forwards, hooks, values and requires_grad.

        A model that was given to ``from_pretrained`` as ``base_model`` comes back without the posterior's adapter.

        From then on this object has no members: predictions, training and ``show`` raise a ValueError. Its ``theta``,
        ``layout`` and ``config`` stay readable. A second call changes nothing, also where the wrapped model has been
        attached anew.
        """
        if not self.members.attached:
            return self.model
        self.members.remove()
        self.model = self._restoration.give_back(self.model)
        return self.model

    def __enter__(self) -> BayesianModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def get_input_embeddings(self) -> nn.Module:
        return self.core.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        return self.core.get_output_embeddings()

    # transformers has both names: from 5.23 on Trainer calls the first, before it the second

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        self.members.checkpointing.enable(self.core.activation_checkpointing_enable, *args, **kwargs)

    def activation_checkpointing_disable(self) -> None:
        self.core.activation_checkpointing_disable()

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        self.members.checkpointing.enable(self.core.gradient_checkpointing_enable, *args, **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        self.core.gradient_checkpointing_disable()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "a BayesianModel is saved as a posterior: BayesianTrainer.save_model(), or Posterior.save_pretrained()"
        )

    def push_to_hub(self, *args: Any, **kwargs: Any) -> str:
        """Refused at once: transformers' own would make the repository, and then ask for ``save_pretrained``."""
        raise ValueError(
            "a BayesianModel is pushed as a posterior: BayesianTrainer.push_to_hub(), or Posterior.push_to_hub(), of a "
            "loaded model model.posterior.push_to_hub()"
        )

    @classmethod
    def from_pretrained(
        cls,
        directory_or_repo: str | os.PathLike[str] | Posterior,
        *,
        members: int | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        trust_remote_code: bool = False,
        base_model: str | os.PathLike[str] | PreTrainedModel | None = None,
        check_base: bool = True,
        prediction: str | None = None,
    ) -> Self:
        """A saved posterior on its base model.

        Args:
            directory_or_repo: a posterior directory, a repository of the Hub, or a ``Posterior`` in memory.
            members: how many, by which is predicted then; None means all draws, or 10 of a Gaussian.
            revision, subfolder: of the repository.
            token, cache_dir, force_download, local_files_only: as in transformers, of the base model, too.
            dtype: of the base model; None keeps the one the posterior was made with. Members stay float32.
            device_map: as in transformers, onto one device.
            trust_remote_code: handed on to transformers for the base model; a posterior never brings code.
            base_model: where the base is now, or the model itself; None takes the name in the posterior.
            check_base: refuse a base model whose fingerprint differs.
            prediction: "members"; or by outputs that are linear in the parameters: "linearised" (by draws of the
                outputs), "linearised_probit" or "linearised_bridge" (see ``linearise``). None takes what is stored with
                the posterior, or "members" where their number is given: a Laplace approximation of a classifier of
                sequences or images, or of a regression, is linearised, everything else has members.
        Raises:
            ValueError: for a damaged posterior, another task, or another base model; naming what is wrong.
        """
        own_base = GradientFlags(base_model) if isinstance(base_model, nn.Module) else None
        model, layout, theta, posterior = load(
            directory_or_repo,
            cls.task,
            cls.auto_class,
            members=members,
            location={
                "revision": revision,
                "subfolder": subfolder,
                "token": token,
                "cache_dir": cache_dir,
                "force_download": force_download,
                "local_files_only": local_files_only,
            },
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            base_model=base_model,
            check_base=check_base,
        )
        bayesian = cls(model, layout, theta, **cls.settings_of(posterior.config.head))
        bayesian._restoration.own_base = own_base
        bayesian.use_settings_of(posterior)
        stored = "members" if members is not None else posterior.config.prediction
        return bayesian.eval().predict_by(stored if prediction is None else prediction)

    def predict_by(self, prediction: str) -> Self:
        """Predict from now on by members, or linearised: one of ``predictive.PREDICTIONS``.

        Raises:
            ValueError: for another name, and as ``linearise``.
        """
        if not isinstance(prediction, str) or prediction not in PREDICTIONS:
            raise ValueError(f"prediction must be one of {', '.join(PREDICTIONS)}, got {prediction!r:.100}")
        return self.linearise(PREDICTIONS[prediction])

    def linearise(self, link: str | None = "monte_carlo") -> Self:
        """Predict from now on by outputs that are linear in theta, f(x, mean) + J (theta - mean), theta ~ N(mean, V).

        Args:
            link: from Gaussian logits to probabilities, a name of ``gaussian_links.LINKS``; regressions need none. None
                goes back to members.
        Raises:
            ValueError: for another link, for a posterior that is not Gaussian, and where the task's class cannot
                predict so. The model then predicts as before.
        """
        self.predictor = self._predictor_by(link)
        return self

    def _predictor_by(self, link: str | None) -> Predictor:
        """Return a predictor by ``link``; None is by members."""
        raise AssertionError("the task's class defines _predictor_by")

    @property
    def is_linearised(self) -> bool:
        """True if predictions are linear in theta."""
        return self.predictor.link is not None

    @property
    def is_closed_form(self) -> bool:
        """True if predictions integrate over the Gaussian itself, so that no number of members enters."""
        return not self.predictor.averages_members

    def use_settings_of(self, posterior: Posterior) -> None:
        """Take what the posterior that the model was loaded from says beside its members."""
        self.posterior = posterior

    @staticmethod
    def settings_of(head: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the class that a posterior's ``head`` holds."""
        return {}

    # -- members ------------------------------------------------------------------------------------------------

    def log_lik(
        self, theta: Tensor, inputs: dict[str, Any], *, folded: bool, weights: Tensor | None = None
    ) -> MemberLogLik:
        """Sums of log-likelihoods of a batch with ``labels`` for the members ``theta`` [m, d], differentiable in it.

        Args:
            weights: [m, n] of the n terms of a batch that is not folded; None counts each once.
        """
        raise AssertionError("the task's class defines log_lik")

    def evaluate_batch(
        self, inputs: dict[str, Any], *, keep_logits: bool = False
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """What evaluation needs of a batch with ``labels``.

        Returns:
            [n] tensors, one entry per likelihood term: nll, confidence, correct, brier, total, aleatoric, epistemic
            of the mixture and member_nll, the mean over members (for regression: nll and member_nll), beside
            member_log_lik [n, M], log p of the label of each member; and, if asked for, the mixture's logits in the
            shape of the wrapped model's.
        """
        raise AssertionError("the task's class defines evaluate_batch")

    def each_term(self, inputs: dict[str, Any], function: Callable[[Tensor, Tensor], Any]) -> list[Any]:
        """What ``function`` makes of the members' logits [M, n, C] and the labels [n] (or [n, C]) of likelihood terms.

        It is handed all terms of a batch with ``labels``, in their order, a few at a time where C is a vocabulary.
        """
        raise AssertionError("the task's class defines each_term")

    def terms_per_row(self, inputs: Mapping[str, Any]) -> Tensor:
        """[B]: how many likelihood terms each row of a batch with ``labels`` [B, ...] has."""
        labels = inputs["labels"]
        labels = next_tokens(labels, inputs.get("attention_mask")) if self.shifts_labels else labels
        terms = self.likelihood.is_term(labels)
        return terms.reshape(len(labels), -1).sum(1)

    @property
    def num_outputs(self) -> int:
        """C: classes, labels or numbers that the head answers."""
        return self.config.num_labels

    @property
    def num_root_columns(self) -> int | None:
        """Of a root of the Fisher information of a likelihood term in the model's outputs; None of unknown outputs."""
        return self.likelihood.num_root_columns(self.num_outputs)

    def take_rows(self, inputs: dict[str, Any], index: Tensor) -> dict[str, Any]:
        """The rows of a batch with these numbers ``index`` [k], in this order; a row may come several times."""
        rows = num_rows_of(inputs)
        return {
            name: value[index.to(value.device)] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value
            for name, value in inputs.items()
        }

    def num_positions(self, inputs: dict[str, Any]) -> int:
        """T: what a row of a batch costs, in positions."""
        return num_positions_of(inputs)

    def passes(self, inputs: dict[str, Any]) -> list[Tensor]:
        """The current members in the groups that go through the model together."""
        rows, length = num_rows_of(inputs), self.num_positions(inputs)
        size = self.members_per_pass or self.members.pass_size(self.num_members, rows, length)
        return list(self.members.chunks(self.current, size))


@torch.compiler.disable
def _refuse_compiling() -> None:
    """Outside of the graph, so that the words arrive."""
    raise ValueError(
        "a model with a member axis cannot be compiled as a whole: members, trunk and head exchange forwards while it "
        f"runs. Compile its layers in place: {COMPILE_LAYERS}"
    )


def _refuse_members(layout: Layout, theta: Tensor) -> None:
    wide = theta.dtype in (torch.float32, torch.float64)
    if not wide or theta.ndim != 2 or len(theta) == 0 or theta.shape[1] != layout.dim:
        raise ValueError(
            f"theta must be float32 or float64 [members, {layout.dim}] ({len(layout.names)} random tensors), "
            f"got {theta.dtype} {list(theta.shape)}"
        )
