"""A Bayesian model that behaves like one ordinary transformers model: its logits are the log of the mixture.

Rows of a batch are folded member-major inside ``forward``; ``generate``, stock pipelines and ``Trainer.evaluate`` see
B rows in and B rows out.
"""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutput

from hf_bayes.artifact import Posterior
from hf_bayes.generation import (
    GenerationTrace,
    Scores,
    TraceStreamer,
    WatchedCriteria,
    join,
    record,
    refuse_unsupported,
    to_scores,
)
from hf_bayes.likelihood import IGNORE, Bernoulli, Categorical, Likelihood, Normal, widened
from hf_bayes.loading import load
from hf_bayes.members import Members
from hf_bayes.members.cache import merge_caches, mergeable, reorder_cache
from hf_bayes.members.head import ChunkedHead
from hf_bayes.members.trunk import num_positions_of, num_rows_of
from hf_bayes.metrics import per_row_statistics
from hf_bayes.subspace import Layout, initial, select
from hf_bayes.uncertainty import Prediction, Uncertainty, predict


@dataclass
class BayesianCausalLMOutput(CausalLMOutputWithPast):
    """``logits`` [B, T, V] are the log of the mixture; uncertainties [B, T] in nats."""

    total: Tensor | None = None
    aleatoric: Tensor | None = None
    epistemic: Tensor | None = None


@dataclass
class BayesianClassifierOutput(SequenceClassifierOutput):
    """``logits`` [B, C] are the log of the mixture; uncertainties [B] in nats (for regression: the members' mean, no
    uncertainties)."""

    total: Tensor | None = None
    aleatoric: Tensor | None = None
    epistemic: Tensor | None = None


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

    Attributes:
        theta: nn.Parameter [M, d], the members (in training: where the gradient of each chain is wanted).
        layout: the random parameters, side by side in a row of theta.
    """

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    likelihood: Likelihood
    task: ClassVar[str]
    posterior: Posterior | None = None
    """What the model was loaded from."""

    def __init__(self, model: nn.Module, layout: Layout, theta: Tensor, *, trunk: bool = True) -> None:
        core = model.get_base_model() if isinstance(model, PeftModel) else model
        _refuse_foreign(core, layout, theta)
        super().__init__(core.config)
        self.model, self.layout = model, layout
        self._frozen_before = [(p, p.requires_grad) for p in model.parameters()]
        self.members = Members(model, core, layout, trunk=trunk)
        self.members_per_pass: int | None = None
        self._shown: Tensor | None = None
        self.theta = nn.Parameter(theta)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.members.install()

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
    def device(self) -> torch.device:
        return self.theta.device

    @property
    def dtype(self) -> torch.dtype:
        return self.core.dtype

    def show(self, theta: Tensor | None) -> None:
        """Let evaluation and generation see ``theta`` [M', d] in place of the parameter; None ends it."""
        self._shown = None if theta is None else theta.to(self.theta.device)

    def detach(self) -> nn.Module:
        """Give the wrapped model back exactly as it was: forwards, hooks, values and requires_grad."""
        self.members.remove()
        for parameter, requires_grad in self._frozen_before:
            parameter.requires_grad_(requires_grad)
        return self.model

    def __enter__(self) -> BayesianModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def get_input_embeddings(self) -> nn.Module:
        return self.core.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        return self.core.get_output_embeddings()

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        self.members.checkpointing.enable(*args, **kwargs)

    def activation_checkpointing_disable(self) -> None:
        self.core.activation_checkpointing_disable()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "a BayesianModel is saved as a posterior: BayesianTrainer.save_model(), or Posterior.save_pretrained()"
        )

    @classmethod
    def from_pretrained(
        cls,
        directory_or_repo: str | os.PathLike[str],
        *,
        members: int | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        trust_remote_code: bool = False,
        base_model: str | os.PathLike[str] | PreTrainedModel | None = None,
        check_base: bool = True,
    ) -> Self:
        """A saved posterior on its base model.

        Args:
            directory_or_repo: a posterior directory or a repository of the Hub.
            members: how many; None means all draws, or 10 of a Gaussian.
            revision, subfolder, token: of the repository.
            dtype: of the base model; None keeps the one the posterior was made with. Members stay float32.
            device_map: as in transformers, onto one device.
            trust_remote_code: handed on to transformers for the base model; a posterior never brings code.
            base_model: where the base is now, or the model itself; None takes the name in the posterior.
            check_base: refuse a base model whose fingerprint differs.
        Raises:
            ValueError: for a damaged posterior, another task, or another base model; naming what is wrong.
        """
        model, layout, theta, posterior = load(
            directory_or_repo, cls.task, members=members, revision=revision, subfolder=subfolder, token=token, dtype=dtype,
            device_map=device_map, trust_remote_code=trust_remote_code, base_model=base_model, check_base=check_base,
        )  # fmt: skip
        bayesian = cls(model, layout, theta, **cls.settings_of(posterior.config.head))
        bayesian.posterior = posterior
        return bayesian.eval()

    @staticmethod
    def settings_of(head: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the class that a posterior's ``head`` holds."""
        return {}

    # -- members ------------------------------------------------------------------------------------------------

    def log_lik(self, theta: Tensor, inputs: dict[str, Any], *, folded: bool) -> MemberLogLik:
        """Sums of log-likelihoods of a batch with ``labels`` for the members ``theta`` [m, d], differentiable in it."""
        raise AssertionError("the task's class defines log_lik")

    def evaluate_batch(self, inputs: dict[str, Any], *, keep_logits: bool = False) -> tuple[dict[str, Tensor], Tensor | None]:
        """What evaluation needs of a batch with ``labels``.

        Returns:
            [n] tensors, one entry per likelihood term: nll, confidence, correct, brier, total, aleatoric, epistemic
            of the mixture and member_nll, the mean over members (for regression: nll and member_nll); and, if asked
            for, the mixture's logits in the shape of the wrapped model's.
        """
        raise AssertionError("the task's class defines evaluate_batch")

    def _passes(self, inputs: dict[str, Any]) -> list[Tensor]:
        rows, length = num_rows_of(inputs), num_positions_of(inputs)
        size = self.members_per_pass or self.members.pass_size(self.num_members, rows, length)
        return list(self.members.chunks(self.current, size))


class BayesianModelForCausalLM(BayesianModel, GenerationMixin):
    """M causal language models as one: ``generate`` samples from the posterior predictive, token by token."""

    task = "causal_lm"

    def __init__(self, model: nn.Module, layout: Layout, theta: Tensor, *, trunk: bool = True) -> None:
        super().__init__(model, layout, theta, trunk=trunk)
        try:
            self.head = ChunkedHead(self.members)
        except ValueError:
            self.detach()
            raise
        self.generation_config = self.core.generation_config
        self.likelihood = Categorical()
        self._trace: GenerationTrace | None = None

    def log_lik(self, theta: Tensor, inputs: dict[str, Any], *, folded: bool) -> MemberLogLik:
        inputs = {**inputs, "use_cache": False}
        labels = _shifted(inputs.pop("labels"))
        inputs.pop("logits_to_keep", None)
        members = len(theta)
        with self.members.bind(theta):
            hidden, output = self.head.hidden(inputs, folded=folded)
            rows = labels.shape[0] // members if folded else labels.shape[0]
            hidden = self.head.per_member(hidden, rows)
            labels = labels.reshape(members if folded else 1, -1)
            wanted = self.likelihood.is_term(labels).any(0).nonzero()[:, 0]
            labels = labels[:, wanted].expand(members, -1)
            log_lik = self.head.log_lik(hidden[:, wanted], output, labels, self.likelihood.log_prob)
            self.members.check_all_read()
        return MemberLogLik(-log_lik, self.likelihood.is_term(labels).sum(1))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        theta: Tensor | None = None,
        folded: bool = False,
        **kwargs: Any,
    ) -> BayesianCausalLMOutput | MemberLogLik:
        """The mixture of all members; with ``theta``, what training needs of them instead (``log_lik``).

        Args:
            labels: [B, T]; the loss is the mean negative log-likelihood of the mixture over its terms.
            logits_to_keep: as in transformers: the last k positions, or a tensor of positions; 0 means all.
        Returns:
            Logits [B, T, V] (float32) and uncertainties [B, T].
        Raises:
            ValueError: for outputs that have no meaning for a mixture (hidden states, attentions).
        """
        if kwargs.pop("output_hidden_states", None) or kwargs.pop("output_attentions", None):
            raise ValueError("hidden states and attentions differ from member to member: ask members of `model.core`")
        kwargs.pop("return_dict", None)
        kwargs.pop("num_items_in_batch", None)
        named = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
                 "inputs_embeds": inputs_embeds, "use_cache": use_cache}  # fmt: skip
        inputs = {**{k: v for k, v in named.items() if v is not None}, **kwargs}
        if theta is not None:
            return self.log_lik(theta, {**inputs, "labels": labels}, folded=folded)
        if self._trace is not None and input_ids is not None:
            self._trace.chosen(input_ids[:, -1])
        hidden, output, cache = self._hidden(inputs, past_key_values)
        rows, length = num_rows_of(inputs), hidden.shape[1]
        steps = _kept(logits_to_keep, length, hidden.device)
        positions = (torch.arange(rows, device=hidden.device)[:, None] * length + steps).flatten()
        prediction = self._predict(hidden, output, rows, positions)
        logits = prediction.log_probs.view(rows, len(steps), -1)
        loss = None
        if labels is not None:
            targets = _shifted(labels)[:, steps]
            terms = self.likelihood.is_term(targets)
            loss = -self.likelihood.log_prob(logits, targets).sum() / terms.sum().clamp_min(1)
        shape = (rows, len(steps))
        return BayesianCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            **{name: value.view(shape) for name, value in prediction.uncertainty._asdict().items()},
        )

    def evaluate_batch(self, inputs: dict[str, Any], *, keep_logits: bool = False) -> tuple[dict[str, Tensor], Tensor | None]:
        inputs = {**inputs, "use_cache": False}
        targets = _shifted(inputs.pop("labels"))
        hidden, output, _ = self._hidden(inputs, None)
        rows, flat = targets.shape[0], targets.flatten()
        wanted = None if keep_logits else self.likelihood.is_term(flat).nonzero()[:, 0]
        pieces, logits_kept = [], []
        with self.members.bind(self.current):
            for index, logits in self.head.stream(hidden, output, rows, wanted):
                prediction = predict(logits)
                if keep_logits:
                    logits_kept.append(prediction.log_probs)
                pieces.append(_statistics(prediction, logits, flat[index]))
        statistics = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        return statistics, torch.cat(logits_kept).view(*targets.shape, -1) if keep_logits else None

    def _hidden(self, inputs: dict[str, Any], cache: Any) -> tuple[Tensor, Any, Any]:
        """Hidden states of all members ([B, T, h] if alike), the backbone's last output, and the cache."""
        passes = self._passes(inputs)
        if len(passes) > 1 and cache is None:
            wanted = inputs.get("use_cache")  # a cache that nobody asked for would hold all members
            cache = DynamicCache(config=self.config.get_text_config(decoder=True)) if wanted else None
            inputs = {**inputs, "use_cache": bool(wanted)}
        if len(passes) > 1 and cache is not None and not mergeable(cache):
            passes = [self.current]  # members of one pass share one cache; only an empty plain one can be pieced together
        pieces, outputs = [], []
        for theta in passes:
            own = {} if cache is None else {"past_key_values": cache if len(passes) == 1 else type(cache)()}
            with self.members.bind(theta):
                hidden, output = self.head.hidden({**inputs, **own})
            pieces.append(hidden)
            outputs.append(output)
        if cache is None and len(passes) == 1:
            cache = outputs[0].past_key_values
        elif len(passes) > 1:
            caches = [output.past_key_values for output in outputs]
            cache = None if caches[0] is None else merge_caches(cache, caches, self.members.num_trunk_blocks)
        return pieces[0] if self.head.alike else torch.cat(pieces), outputs[-1], cache

    def _predict(self, hidden: Tensor, output: Any, rows: int, positions: Tensor) -> Prediction:
        """The mixture at flat positions: log_probs [n, V] and uncertainties [n]."""
        pieces = []
        with self.members.bind(self.current):
            for _, logits in self.head.stream(hidden, output, rows, positions):
                pieces.append(predict(logits))
                if self._trace is not None:
                    self._trace.observe(pieces[-1], logits)
        log_probs = torch.cat([piece.log_probs for piece in pieces])
        parts = zip(*(piece.uncertainty for piece in pieces), strict=True)
        return Prediction(log_probs, Uncertainty(*(torch.cat(part) for part in parts)))

    # -- generation ---------------------------------------------------------------------------------------------

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.core.prepare_inputs_for_generation(*args, **kwargs)

    def _reorder_cache(self, past_key_values: Any, beam_idx: Tensor) -> Any:
        """generate's own hook: beams permute sequences, and a layer holds B or M * B rows of them."""
        return reorder_cache(past_key_values, beam_idx, self.num_members, self.members.num_trunk_blocks)

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        """transformers' ``generate``, unchanged, from the mixture.

        With ``return_dict_in_generate=True`` the output has six more fields (``generation.Scores``): ``total``,
        ``aleatoric``, ``epistemic``, ``logprobs`` [rows, new tokens], NaN after the end of a row, and
        ``sequence_logprob``, ``sequence_logprob_tokenwise`` [rows]; all of the raw mixture, before logits processors.

        Raises:
            ValueError: for assisted decoding and continuous batching, whose caches know nothing of members.
        """
        refuse_unsupported(kwargs, self.generation_config)
        self._trace = trace = GenerationTrace()
        if isinstance(streamer := kwargs.get("streamer"), TraceStreamer):
            streamer.watch(trace)
        try:
            output = super().generate(inputs, **kwargs)
        finally:
            self._trace = None
        if isinstance(output, Tensor):
            return output
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        if prompt is None:
            prompt = output.sequences[:, :1]  # nothing was given: generate began with the bos token
        new = output.sequences[:, prompt.shape[1] :]
        # beams permute rows between steps: there, read the finished sequences once more
        beams = output.get("beam_indices")
        ends = trace.lengths if beams is None else (beams >= 0).sum(1)
        scores = trace.scores(new, ends) if beams is None else None
        if scores is None:
            mask = trace.prompt_mask if kwargs.get("attention_mask") is None else kwargs["attention_mask"]
            scores = self._score_generated(output.sequences, prompt, ends, mask)
        for name, value in scores._asdict().items():
            output[name] = value
        return output

    @torch.no_grad()
    def score(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, first: int = 1) -> Scores:
        """What the posterior says of given text, teacher-forced.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 0 at padding on either side.
            first: the first position that is scored; the tokens before it are context.
        Returns:
            Fields of [B, T - first] (NaN where a token or the one before it is padding) and [B].
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows, length = input_ids.shape
        inputs = {"input_ids": input_ids, "attention_mask": mask, "use_cache": False}
        if "position_ids" in inspect.signature(self.core.forward).parameters:
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)  # as generate numbers left-padded rows
        hidden, output, _ = self._hidden(inputs, None)
        valid = (mask[:, first:] * mask[:, first - 1 : -1]).bool()
        flat = torch.arange(rows * length, device=hidden.device).view(rows, length)[:, first - 1 : -1][valid]
        pieces = []
        with self.members.bind(self.current):
            for index, logits in self.head.stream(hidden, output, rows, flat):
                pieces.append(record(predict(logits), logits, input_ids.flatten()[index + 1]))
        return to_scores(join(pieces), valid)

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """generate's own hook: on GPUs it compiles the forward for static caches, which ours does not survive."""
        return False

    def _prepare_attention_mask_for_generation(self, *args: Any, **kwargs: Any) -> Tensor:
        """generate's own hook: called where no mask is given, to tell padding by its token."""
        mask = super()._prepare_attention_mask_for_generation(*args, **kwargs)
        if self._trace is not None:
            self._trace.prompt_mask = mask
        return mask

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        """generate's own hook: which row stops when is decided there and told to nobody else."""
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        return criteria if self._trace is None else WatchedCriteria(criteria, self._trace)

    def _score_generated(self, sequences: Tensor, prompt: Tensor, ends: Tensor, mask: Tensor | None) -> Scores:
        start = prompt.shape[1]
        given = (torch.ones_like(prompt) if mask is None else mask).repeat_interleave(len(sequences) // len(prompt), 0)
        step = torch.arange(sequences.shape[1] - start, device=sequences.device)
        return self.score(sequences, torch.cat([given, (step < ends[:, None]).to(given.dtype)], 1), first=start)


class BayesianModelForSequenceClassification(BayesianModel):
    """M classifiers (or regressors) as one; also any model whose ``logits`` [B, C] answer ``labels`` [B]."""

    task = "sequence_classification"

    def __init__(
        self, model: nn.Module, layout: Layout, theta: Tensor, *, trunk: bool = True, noise_std: float | None = None
    ) -> None:
        super().__init__(model, layout, theta, trunk=trunk)
        try:
            self.likelihood = _classifier_likelihood(self.config, noise_std)
        except ValueError:
            self.detach()
            raise

    def log_lik(self, theta: Tensor, inputs: dict[str, Any], *, folded: bool) -> MemberLogLik:
        inputs = dict(inputs)
        labels, members = inputs.pop("labels"), len(theta)
        with self.members.bind(theta):
            logits = self._logits(inputs, members, folded=folded)
            self.members.check_all_read()
        labels = labels.unflatten(0, (members, -1)) if folded else labels.expand(members, *labels.shape)
        terms = self.likelihood.is_term(labels.flatten(0, 1)).view(members, -1).sum(1)
        return MemberLogLik(-self.likelihood.log_prob(logits, labels).sum(1), terms)

    def forward(
        self, labels: Tensor | None = None, *, theta: Tensor | None = None, folded: bool = False, **inputs: Any
    ) -> BayesianClassifierOutput | MemberLogLik:
        """The mixture of all members; with ``theta``, what training needs of them instead (``log_lik``).

        Args:
            labels: [B] classes (or [B, C] for multi-label and regression); the loss is that of the mixture.
            theta: [m, d] members to differentiate.
            folded: with ``theta``: the batch holds other rows for each member.
            inputs: what the wrapped model takes.
        """
        for name in ("return_dict", "num_items_in_batch", "output_hidden_states", "output_attentions"):
            inputs.pop(name, None)
        if theta is not None:
            return self.log_lik(theta, {**inputs, "labels": labels}, folded=folded)
        logits = self._member_logits(inputs)
        loss = None
        if labels is not None:
            terms = self.likelihood.is_term(labels)
            loss = self._mixture_nll(logits, labels)[terms].sum() / terms.sum().clamp_min(1)
        if not isinstance(self.likelihood, Categorical):
            return BayesianClassifierOutput(loss=loss, logits=self._mean(logits))
        prediction = predict(logits)
        return BayesianClassifierOutput(loss=loss, logits=prediction.log_probs, **prediction.uncertainty._asdict())


    def evaluate_batch(self, inputs: dict[str, Any], *, keep_logits: bool = False) -> tuple[dict[str, Tensor], Tensor | None]:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        logits = self._member_logits(inputs)
        if isinstance(self.likelihood, Categorical):
            prediction, terms = predict(logits), self.likelihood.is_term(labels)
            mixture = prediction.log_probs
            kept = Prediction(mixture[terms], Uncertainty(*(part[terms] for part in prediction.uncertainty)))
            statistics = _statistics(kept, logits[:, terms], labels[terms])
        else:
            mixture = self._mean(logits)
            member_nll = -self.likelihood.log_prob(logits, labels.expand(len(logits), *labels.shape)).mean(0)
            statistics = {"nll": self._mixture_nll(logits, labels), "member_nll": member_nll}
        return statistics, mixture if keep_logits else None

    @staticmethod
    def settings_of(head: dict[str, Any]) -> dict[str, Any]:
        return {"noise_std": head.get("noise_std")}

    def _member_logits(self, inputs: dict[str, Any]) -> Tensor:
        """[M, B, C]"""
        pieces = []
        for theta in self._passes(inputs):
            with self.members.bind(theta):
                pieces.append(self._logits(inputs, len(theta)))
        return torch.cat(pieces)

    def _logits(self, inputs: dict[str, Any], num_members: int, *, folded: bool = False) -> Tensor:
        """[m, B, C] of the members now bound."""
        output = self.members.forward(inputs, folded=folded)
        if getattr(output, "logits", None) is None:
            raise ValueError(f"{type(self.core).__name__} answers no logits: give a model with a head, such as "
                             "AutoModelForSequenceClassification loads")  # fmt: skip
        return output.logits.unflatten(0, (num_members, -1))

    def _mean(self, logits: Tensor) -> Tensor:
        """[M, B, C] -> [B, C]: the members' mean, and of labels of their own the logits of their mean probabilities."""
        logits = widened(logits)
        if not isinstance(self.likelihood, Bernoulli):
            return logits.mean(0)
        # as logarithms, since a probability rounds to 1
        return nn.functional.logsigmoid(logits).logsumexp(0) - nn.functional.logsigmoid(-logits).logsumexp(0)

    def _mixture_nll(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[B]: -log mean_m p_m(label)."""
        per_member = self.likelihood.log_prob(logits, labels.expand(len(logits), *labels.shape))
        return math.log(len(logits)) - per_member.logsumexp(0)


def _statistics(prediction: Prediction, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """[n] numbers of n terms (NaN-free only where ``labels`` is a term; others are dropped)."""
    terms = labels != IGNORE
    log_probs, labels = prediction.log_probs[terms], labels[terms]
    members = widened(logits[:, terms])
    chosen = members.gather(-1, labels.expand(len(members), -1)[..., None])[..., 0] - members.logsumexp(-1)
    uncertainty = {name: value[terms] for name, value in prediction.uncertainty._asdict().items()}
    return {**per_row_statistics(log_probs, labels), **uncertainty, "member_nll": -chosen.mean(0)}


def attach(
    model: nn.Module,
    theta: Tensor | None = None,
    *,
    subspace: str = "trainable",
    num_members: int = 1,
    trunk: bool = True,
    noise_std: float | None = None,
) -> BayesianModel:
    """Give a transformers or peft model a member axis, in place. Undo with ``.detach()`` or use as a context manager.

    Args:
        model: a causal language model or a sequence classifier; nothing in it is changed but forwards and hooks.
        theta: [M, d] members; None means ``num_members`` copies of the model's own values.
        subspace: which parameters are random (see ``subspace.select``).
        num_members: M, where theta is not given.
        trunk: run the layers before the first random one once for all members.
        noise_std: of a regression head's Gaussian likelihood.
    Raises:
        ValueError: for what cannot be stacked, naming it; the model is then as it was.
    """
    layout = select(model, subspace)
    if theta is None:
        theta = initial(model, layout).expand(num_members, -1).clone()
    core = model.get_base_model() if isinstance(model, PeftModel) else model
    if isinstance(core, PreTrainedModel) and core.can_generate():
        return BayesianModelForCausalLM(model, layout, theta, trunk=trunk)
    return BayesianModelForSequenceClassification(model, layout, theta, trunk=trunk, noise_std=noise_std)


def _refuse_foreign(core: nn.Module, layout: Layout, theta: Tensor) -> None:
    """Raise before anything is touched."""
    if not isinstance(core, PreTrainedModel) or core.config.is_encoder_decoder:
        kind = "an encoder-decoder model" if isinstance(core, PreTrainedModel) else "not a transformers model"
        raise ValueError(
            f"{type(core).__name__} is {kind}; supported are decoder-only causal language models and sequence "
            "classifiers"
        )
    wide = theta.dtype in (torch.float32, torch.float64)
    if not wide or theta.ndim != 2 or len(theta) == 0 or theta.shape[1] != layout.dim:
        raise ValueError(
            f"theta must be float32 or float64 [members, {layout.dim}] ({len(layout.names)} random tensors), "
            f"got {theta.dtype} {list(theta.shape)}"
        )


def _classifier_likelihood(config: Any, noise_std: float | None) -> Likelihood:
    problem = getattr(config, "problem_type", None) or ("regression" if config.num_labels == 1 else None)
    if problem == "regression":
        if noise_std is None or not noise_std > 0:
            raise ValueError(
                f"a regression head needs noise_std > 0, the standard deviation of its labels' noise, got {noise_std}: "
                "set BayesianTrainingArguments(noise_std=...)"
            )
        return Normal(noise_std)
    return Bernoulli() if problem == "multi_label_classification" else Categorical()


def _shifted(labels: Tensor) -> Tensor:
    """[B, T] -> [B, T]: the label of position t is the token at t + 1; the last has none."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def _kept(logits_to_keep: int | Tensor, length: int, device: torch.device) -> Tensor:
    steps = torch.arange(length, device=device)
    if isinstance(logits_to_keep, Tensor):
        return logits_to_keep.to(device)
    return steps[-logits_to_keep:] if logits_to_keep else steps
