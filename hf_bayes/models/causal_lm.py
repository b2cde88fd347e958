"""M causal language models as one model: the mixture's logits, text with uncertainty, and scores of given text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_bayes.core.layout import Layout
from hf_bayes.core.tensors import joined
from hf_bayes.members.compat.transformers import CACHE, with_cache_named
from hf_bayes.members.head import ChunkedHead
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.decoding import Decoding, score, token_types_beside
from hf_bayes.models.language.causal_members import CausalMembers, HiddenStates
from hf_bayes.models.language.generation_refusals import refuse
from hf_bayes.models.language.kept_positions import LogitsToKeep, kept_positions, num_last_kept
from hf_bayes.models.language.positions import numbered
from hf_bayes.models.language.token_uncertainty import GenerationTrace, Scores
from hf_bayes.models.prediction.distilled import DistilledTokens
from hf_bayes.models.prediction.tokens import MemberTokens, TokenPredictor, token_predictor
from hf_bayes.models.prediction_mode import predicts
from hf_bayes.models.predictors import MemberLogLik, Predictive, Reader, Readings
from hf_bayes.models.refusals import refuse_bidirectional, refuse_hidden_state, refuse_layer_outputs
from hf_bayes.models.single_pass.predictors import SinglePassTokens
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.uncertainty.likelihoods import Categorical, next_tokens, refuse_labels


@dataclass
class BayesianCausalLMOutput(CausalLMOutputWithPast):
    """``logits`` [B, T, V] are the log of the mixture; uncertainties [B, T] in nats."""

    total: Tensor | None = None
    aleatoric: Tensor | None = None
    epistemic: Tensor | None = None


class BayesianModelForCausalLM(BayesianModel, GenerationMixin):
    """M causal language models as one model. ``generate`` samples from the posterior predictive, token by token.

    Attributes:
        head: runs the backbone once and the head on chunks of positions.
        decoding: the state and the checks of ``generate``.
    """

    task = "causal_lm"
    term_kind = "token"
    auto_class: ClassVar[Any] = AutoModelForCausalLM
    predictor: TokenPredictor

    def __init__(self, model: nn.Module, layout: Layout, theta: Tensor, *, trunk: bool = True) -> None:
        super().__init__(model, layout, theta, trunk=trunk)
        try:
            self.head = ChunkedHead(self.members)
            self.generation_config = self.core.generation_config
        except (ValueError, AttributeError):
            self.detach()
            raise
        self.likelihood = Categorical()
        self.causal = CausalMembers(self.members, self.head)
        self.predictor = MemberTokens(self.causal)
        self.decoding = Decoding(self.causal)

    @classmethod
    def check_core(cls, core: nn.Module) -> None:
        refuse_bidirectional(core)
        refuse_hidden_state(core)

    def use_settings_of(self, posterior: Posterior) -> None:
        """Prefer the generation config that was saved with the posterior to that of the base model."""
        super().use_settings_of(posterior)
        if (fields := posterior.sidecars.generation_config) is not None:
            self.generation_config = GenerationConfig.from_dict(fields)

    @property
    def num_outputs(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def _num_cached(self) -> int:
        """The number of members whose keys and values a cache holds."""
        return 1 if self.is_closed_form else self.num_members

    @property
    def num_root_columns(self) -> int | None:
        head = self.core.get_output_embeddings()
        return None if head is None else self.likelihood.num_root_columns(head.weight.shape[0])

    def _predictor_by(self, link: str | None) -> TokenPredictor:
        return token_predictor(self.causal, self, link)

    def _student(self) -> TokenPredictor:
        return DistilledTokens(self.causal, self)

    def _single_pass_predictor(self, **options: Any) -> TokenPredictor:
        return SinglePassTokens(self.causal, self, **options)

    # -- inputs -------------------------------------------------------------------------------------------------------

    def refuse_unknown_inputs(self, inputs: dict[str, Any]) -> None:
        """Raise for inputs whose entries cannot be assigned to rows."""

    def numbered(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return ``inputs`` with positions that count from each row's first token, as the model counts a row alone."""
        return numbered(inputs, self.core, self.check_inputs.first_position)

    def reads_rows_apart(self, inputs: dict[str, Any]) -> bool:
        """Return whether each row of a batch is one row, too, for every module with random weights."""
        return True

    def row_slices(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a batch in pieces of whole rows, so that memory does not grow with its rows."""
        return self.causal.row_slices(self, inputs, self.predictor.tensors_per_state)

    # -- likelihood ---------------------------------------------------------------------------------------------------

    def log_lik(
        self, theta: Tensor, inputs: dict[str, Any], *, folded: bool, weights: Tensor | None = None
    ) -> MemberLogLik:
        inputs = {name: value for name, value in inputs.items() if name != "logits_to_keep"} | {"use_cache": False}
        labels = next_tokens(inputs.pop("labels"), inputs.get("attention_mask"))
        numbered = self.numbered(inputs)
        return self.causal.log_lik(self.likelihood, theta, numbered, labels, folded=folded, weights=weights)

    def predictions(self, inputs: dict[str, Any], positions: Tensor) -> Generator[tuple[Tensor, Predictive]]:
        """Yield (flat positions b * T + t [n], the prediction there) of a batch without a cache, a chunk at a time."""
        with self.predictor.open(self):
            states = self.causal.hidden(self, self.numbered(inputs))
            yield from self.predictor.predict(self, states, positions)

    @predicts
    def each_term(self, inputs: dict[str, Any], function: Callable[[Tensor, Tensor], Any]) -> list[Any]:
        found = []
        for rows in self.row_slices(inputs):
            rows = {**rows, "use_cache": False}
            flat = next_tokens(rows.pop("labels"), rows.get("attention_mask")).flatten()
            states = self.causal.hidden(self, self.numbered(rows))
            wanted = self.likelihood.is_term(flat).nonzero()[:, 0]
            logits_there = self.causal.logits(self.current, states, wanted)
            found += [function(logits, flat[index]) for index, logits in logits_there]
        return found

    @predicts
    def read_predictions(self, inputs: dict[str, Any], read: Reader, *, keep_logits: bool = False) -> Readings:
        self.check_inputs(inputs)
        refuse_labels(self.likelihood, inputs["labels"], self.num_outputs)
        found = [self._read_rows(rows, read, keep_logits) for rows in self.row_slices(inputs)]
        kept = [logits for _, logits in found if logits is not None]
        return joined([values for values, _ in found]), torch.cat(kept) if kept else None

    def _read_rows(self, inputs: dict[str, Any], read: Reader, keep_logits: bool) -> Readings:
        inputs = {**inputs, "use_cache": False}
        targets = next_tokens(inputs.pop("labels"), inputs.get("attention_mask"))
        flat = targets.flatten()
        wanted = torch.arange(len(flat), device=flat.device)
        if not keep_logits:
            wanted = self.likelihood.is_term(flat).nonzero()[:, 0]
        pieces, kept = [], []
        with self.predictor.open(self):
            states = self.causal.hidden(self, self.numbered(inputs))
            for index, found in self.predictor.predict(self, states, wanted):
                pieces.append(read(found, flat[index]))
                if keep_logits:
                    kept.append(found.logits)
        return joined(pieces), torch.cat(kept).view(*targets.shape, -1) if keep_logits else None

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: LogitsToKeep = 0,
        *,
        theta: Tensor | None = None,
        folded: bool = False,
        **kwargs: Any,
    ) -> BayesianCausalLMOutput | tuple[Any, ...] | MemberLogLik:
        """Return the mixture of all members; with ``theta``, the members' log-likelihoods for training (``log_lik``).

        Args:
            cache: keys and values of earlier tokens, also accepted as ``past_key_values`` (transformers < 5.24).
            labels: [B, T]; the loss is the mean negative log-likelihood of the mixture over its terms.
            logits_to_keep: as in transformers: the last k positions, a slice or a tensor of positions; 0 means all.
        Returns:
            Logits [B, T, V] (float32) and uncertainties [B, T]; with ``return_dict=False`` as a tuple.
        Raises:
            ValueError: for outputs that have no meaning for a mixture (hidden states, attentions), and for inputs that
                ``InputCheck`` refuses.
        """
        refuse_layer_outputs(kwargs)
        cache = (kwargs := with_cache_named({**kwargs, "cache": cache})).pop(CACHE, None)
        as_tuple = kwargs.pop("return_dict", None) is False
        kwargs.pop("num_items_in_batch", None)
        named = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
                 "inputs_embeds": inputs_embeds, "use_cache": use_cache}  # fmt: skip
        inputs = {**{k: v for k, v in named.items() if v is not None}, **kwargs}
        self.refuse_unknown_inputs(inputs)
        if theta is not None:
            return self.log_lik(theta, {**inputs, "labels": labels}, folded=folded)
        if (trace := self.decoding.begin_step(input_ids)) is None:  # ``generate`` has checked the inputs of its steps
            self.check_inputs.check_pass(inputs, cache)
        output = self._answer(inputs, cache, labels, logits_to_keep, trace)
        return output.to_tuple() if as_tuple else output

    @predicts
    def _answer(
        self,
        inputs: dict[str, Any],
        cache: Any,
        labels: Tensor | None,
        keep: LogitsToKeep,
        trace: GenerationTrace | None,
    ) -> BayesianCausalLMOutput:
        """Return the output of ``forward`` for the mixture, and record it in ``trace`` if there is one."""
        if not self.predictor.keeps_caches:
            if cache is not None:
                raise ValueError(
                    f"{CACHE} does not hold the derivatives of a linearised model's keys and values: give the whole "
                    "text, without a cache; generate does so by itself. linearise(None) goes back to members"
                )
            inputs = {**inputs, "use_cache": False}
        num_kept = num_last_kept(keep) if self.predictor.cuts_feed_forward else 0
        with self.predictor.open(self):
            states = self.causal.hidden_of_last(self, inputs, cache, num_kept)
            rows, length, device = states.num_rows, states.hidden.shape[1], states.hidden.device
            steps = kept_positions(keep, length, device)
            positions = (torch.arange(rows, device=device)[:, None] * length + steps).flatten()
            flat = self._predict(states, positions, trace)
        outputs: dict[str, Any] = {name: value.view(rows, len(steps), *value.shape[1:]) for name, value in flat.items()}
        loss = None
        if labels is not None:
            refuse_labels(self.likelihood, labels, self.num_outputs)
            targets = next_tokens(labels, inputs.get("attention_mask"))[:, steps]
            terms = self.likelihood.is_term(targets)
            loss = -self.likelihood.log_prob(outputs["logits"], targets).sum() / terms.sum().clamp_min(1)
        return BayesianCausalLMOutput(loss=loss, **{CACHE: states.cache}, **outputs)

    def _predict(self, states: HiddenStates, positions: Tensor, trace: GenerationTrace | None) -> dict[str, Tensor]:
        """Return the mixture's logits [n, V] and its uncertainties [n] at flat positions, by name."""
        pieces: list[dict[str, Tensor]] = []
        for _, found in self.predictor.predict(self, states, positions):
            pieces.append({"logits": found.logits, **found.parts})
            if trace is not None:
                assert found.members is not None  # generate refuses closed forms
                trace.observe(*found.members)
        return joined(pieces)

    # -- text ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @predicts
    def generate(  # type: ignore[override]
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """Generate from the mixture with transformers' own ``generate``.

        With ``return_dict_in_generate=True`` the output has six more fields (``Scores``): ``total``, ``aleatoric``,
        ``epistemic``, ``logprobs`` [rows, new tokens], NaN after the end of a row, and ``sequence_logprob``,
        ``sequence_logprob_tokenwise`` [rows]. All are of the raw mixture, before logits processors. A linearised model
        has no cache, and reads the whole text again for every token.

        Raises:
            ValueError: for assisted decoding, decoding loops from elsewhere, caches of other kinds and what else
                docs/models.md lists, for prompts that have no token or end in padding or that ``InputCheck`` refuses,
                for texts that would not fit the model's table of positions, and for a linearised model whose link has a
                closed form.
        """
        kwargs["generation_config"] = generation_config
        return self.decoding.generate(self, super().generate, inputs, kwargs)  # type: ignore[misc]

    @torch.no_grad()
    @predicts
    def score(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, first: int = 1, **inputs: Any
    ) -> Scores:
        """Return the uncertainties and log-probabilities of given text, teacher-forced.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 0 at padding on either side.
            first: the first position to score; the tokens before it are context.
            inputs: further inputs of the wrapped model, such as the images of these texts.
        Returns:
            Fields of [B, T - first] (NaN where a token or the one before it is padding) and [B].
        Raises:
            ValueError: for ids or a mask of another shape, for a first position that nothing precedes, and for a
                linearised model whose link has a closed form.
        """
        return score(self, input_ids, attention_mask, first, inputs)

    def inputs_beside(self, prompt: dict[str, Any], sequences: Tensor) -> dict[str, Any]:
        """Return the further inputs that ``score`` needs for ``sequences`` [rows, T].

        Args:
            prompt: the arguments of the ``generate`` call that produced them, with ``input_ids``.
        """
        return token_types_beside(prompt, sequences)

    # -- generate's own hooks -----------------------------------------------------------------------------------------

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse ``generate_batch`` of transformers, because its paged cache joins the tokens of many rows."""
        refuse("continuous batching", "its paged cache deals one row of tokens to all sequences")

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        cast(Any, self.core)._validate_model_kwargs(model_kwargs)  # only its signatures name all inputs

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.decoding.expect_step(cast(Any, self.core).prepare_inputs_for_generation(*args, **kwargs))

    def _reorder_cache(self, cache: Any, beam_idx: Tensor) -> Any:
        return self.decoding.reorder(self._num_cached, cache, beam_idx)

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> Any:
        config = super()._prepare_generated_length(*args, **kwargs)  # type: ignore[misc]
        return self.decoding.check_length(self.check_inputs, config, kwargs["input_ids_length"])

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], mode: Any, batch_size: int, *args: Any
    ) -> Any:
        self.decoding.check_cache(self._num_cached, generation_config, model_kwargs, batch_size)
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, batch_size, *args)  # type: ignore[misc]

    def _prepare_attention_mask_for_generation(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return self.decoding.remember_mask(super()._prepare_attention_mask_for_generation(*args, **kwargs))

    def _get_logits_processor(self, generation_config: GenerationConfig, **kwargs: Any) -> Any:  # type: ignore[override]
        processors = super()._get_logits_processor(generation_config, **kwargs)  # type: ignore[misc]
        return self.decoding.levelled(processors, generation_config, self.mixture_temperature)

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        return self.decoding.watched(super()._get_stopping_criteria(*args, **kwargs))  # type: ignore[misc]

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """Return False: on GPUs generate compiles the forward for static caches, and a member axis prevents that."""
        return False
