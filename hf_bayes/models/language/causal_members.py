"""The members of a causal language model: hidden states, and logits or log-likelihoods of a few positions at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_bayes.members.cache import empty_like, leave_room, merge_caches, mergeable
from hf_bayes.members.compat.transformers import CACHE, cache_of
from hf_bayes.members.engine import Members
from hf_bayes.members.head import ChunkedHead
from hf_bayes.members.inputs import num_positions_of, num_rows_of, shape_of
from hf_bayes.members.last_feed_forward import CHECKED_POSITIONS
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.language.packing import first_documents
from hf_bayes.models.predictors import MemberLogLik
from hf_bayes.uncertainty.likelihoods import Categorical, Likelihood

HIDDEN_BYTES = 16 << 20
"""Bytes of hidden states that are always allowed, however small the model is: shorter passes would cost time."""


_TOKENS = Categorical()


class HiddenStates(NamedTuple):
    """The result of one run of the backbone.

    Attributes:
        hidden: [M * B, T, h] of all members, or [B, T, h] if only the head is random.
        output: the backbone's own output.
        cache: keys and values of all members; None without a cache.
        num_rows: B.
    """

    hidden: Tensor
    output: Any
    cache: Any
    num_rows: int


class _Terms:
    """The positions of a batch that have a label for any member.

    Args:
        hidden: [M or 1, B * T, h].
        labels: [M or 1, B * T].
        shape: (B, T).
        members: M.
    Attributes:
        hidden: [M or 1, n, h].
        labels: [M, n].
        rows: [n], the row of each position.
        num_rows: B.
    """

    def __init__(self, hidden: Tensor, labels: Tensor, shape: tuple[int, ...], members: int) -> None:
        wanted = _TOKENS.is_term(labels).any(0).nonzero()[:, 0]
        self.hidden, self.labels = hidden[:, wanted], labels[:, wanted].expand(members, -1)
        self.rows, self.num_rows = wanted // shape[1], shape[0]


def _require_one_pass(model: Any, inputs: dict[str, Any], cache: Any) -> None:
    """Require that all members can read a batch in one pass, because the caches of several cannot be joined.

    Raises:
        ValueError: for images that need a pass for each member.
    """
    if not model.reads_rows_apart(inputs):
        raise ValueError(
            f"a {type(cache).__name__} of this kind, or one that holds text already, is filled by all members in one "
            "pass, and these images need a pass for each member, because weights in the part that reads images are "
            "random. Give the whole text at once with a DynamicCache that has only attention layers, or set "
            "use_cache=False"
        )


class CausalMembers:
    """The members of a causal language model, and the two halves of its forward pass: the backbone and the head.

    Positions are flat indices b * T + t.

    Attributes:
        head: runs the backbone once and the head on chunks of positions.
    """

    def __init__(self, members: Members, head: ChunkedHead) -> None:
        self.members, self.head = members, head

    def num_stored(self, num_members: int) -> int:
        """Return the number of members with hidden states, keys and values of their own after the trunk."""
        return 1 if self.head.alike else num_members

    def new_cache(self) -> Any:
        """Return the empty cache that ``generate`` gives this model; None if it makes a cache of its own kind."""
        made: dict[str, Any] = {}
        cast(Any, self.members.core)._prepare_cache_for_generation(GenerationConfig(), made, None, 1, 1)
        return cache_of(made)

    def row_slices(
        self, model: BayesianModel, inputs: dict[str, Any], tensors_per_state: int
    ) -> Iterator[dict[str, Any]]:
        """Yield a batch in pieces of whole rows, so that memory grows neither with its rows nor with its members.

        Hidden states of all members take at most a quarter of the model's memory at once (or one row, or
        ``HIDDEN_BYTES``). The copy that joins the passes of members doubles that.

        Args:
            tensors_per_state: tensors that are held for each hidden state: 2 with a tangent.
        """
        rows, length = shape_of(inputs)
        held = self.num_stored(model.num_members) * (1 if self.head.alike else tensors_per_state)
        width = model.config.get_text_config(decoder=True).hidden_size * model.dtype.itemsize
        budget = max(HIDDEN_BYTES, sum(weight.nbytes for weight in model.core.parameters()) // 4)
        size = max(1, budget // (held * length * width))
        for start in range(0, rows, size):
            yield inputs if size >= rows else model.take_rows(inputs, torch.arange(start, min(start + size, rows)))

    def hidden(self, model: BayesianModel, inputs: dict[str, Any], cache: Any = None) -> HiddenStates:
        """Run the backbone for the current members.

        Args:
            inputs: the inputs of a forward pass; a cache is returned if ``use_cache`` is set. If it is not, packed rows
                are read without a cache, because transformers does not keep documents apart with one.
            cache: keys and values of earlier tokens.
        """
        if cache is None and inputs.get("use_cache") is None and first_documents(inputs) is not None:
            inputs = {**inputs, "use_cache": False}
        # where only the head is random, one member's hidden states are those of all
        passes = [model.current[:1]] if self.head.alike else model.passes(inputs)
        if len(passes) > 1 and cache is None:
            wanted = inputs.get("use_cache")  # an unused cache would hold all members
            cache = self.new_cache() if wanted else None
            inputs = {**inputs, "use_cache": bool(wanted)}
        if len(passes) > 1 and (cache is not None or inputs["use_cache"]) and not mergeable(cache):
            _require_one_pass(model, inputs, cache)
            passes = [model.current]  # members of one pass share one cache; not every kind can be pieced together
        if len(passes) == 1:
            hidden, output = self._pass(passes[0], inputs, cache)
            cache = cache_of(output) if cache is None else cache
            return HiddenStates(hidden, output, leave_room(cache), num_rows_of(inputs))
        with self.members.trunk.run_once():
            runs = [self._pass(theta, inputs, None if cache is None else empty_like(cache)) for theta in passes]
        outputs = [output for _, output in runs]
        if cache is not None:
            caches = [cache_of(output) for output in outputs]
            cache = merge_caches(cache, caches, self.members.num_trunk_blocks)
        return HiddenStates(
            torch.cat([hidden for hidden, _ in runs]), outputs[-1], leave_room(cache), num_rows_of(inputs)
        )

    def hidden_of_last(self, model: BayesianModel, inputs: dict[str, Any], cache: Any, num_kept: int) -> HiddenStates:
        """Run the backbone, and its last feed-forward layer only for the last ``num_kept`` positions; 0 means all."""
        last_feed_forward = self.members.last_feed_forward
        if last_feed_forward.runs_once is None and 0 < num_kept < num_positions_of(inputs):
            names = ("input_ids", "inputs_embeds")
            token = {name: inputs[name][:1, :1] for name in names if inputs.get(name) is not None}
            prompt = {name: value.repeat_interleave(CHECKED_POSITIONS, 1) for name, value in token.items()}
            with self.members.bind(model.current[:1]):
                last_feed_forward.count_calls(lambda: self.head.hidden({**prompt, "use_cache": False}))
        with last_feed_forward.on_last_positions(num_kept or None):
            return self.hidden(model, inputs, cache)

    def logits(self, theta: Tensor, states: HiddenStates, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (flat positions [n], logits [M, n, V] of the members ``theta`` there), a chunk at a time."""
        head = self.head
        with self.members.bind(theta):
            hidden = head.per_member(states.hidden, states.num_rows)
            for index in torch.split(positions, head.chunk_size(hidden)):
                yield index, head.logits(hidden[:, index], states.output)

    def log_lik(
        self,
        likelihood: Likelihood,
        theta: Tensor,
        inputs: dict[str, Any],
        labels: Tensor,
        *,
        folded: bool,
        weights: Tensor | None,
    ) -> MemberLogLik:
        """Return the sums of log-likelihoods for ``theta`` [m, d]; further arguments as of ``BayesianModel.log_lik``.

        Args:
            labels: [B, T] (or [m * B, T] if folded), the next token of every position.
        """
        members = len(theta)
        with self.members.bind(theta):
            hidden, output = self.head.hidden(inputs, folded=folded)
            rows = labels.shape[0] // members if folded else labels.shape[0]
            hidden = self.head.per_member(hidden, rows)
            labels = labels.reshape(members if folded else 1, -1)
            is_term = likelihood.is_term(labels)
            wanted = is_term.any(0).nonzero()[:, 0]
            labels, is_term = labels[:, wanted].expand(members, -1), is_term[:, wanted].expand(members, -1)
            places = torch.arange(labels.shape[1], device=labels.device).expand(members, -1)

            def log_prob(logits: Tensor, places: Tensor) -> Tensor:
                """Return the log-likelihood of the terms at ``places``: the head runs on a few at a time."""
                found = likelihood.log_prob(logits, labels.gather(1, places))
                return found if weights is None else found * weights[..., 0].gather(1, places)

            log_lik = self.head.log_lik(hidden[:, wanted], output, places, log_prob)
            self.members.check_all_read()
        return MemberLogLik(-log_lik, is_term.sum(1))

    def text_log_probs(self, theta: Tensor, inputs: dict[str, Any], labels: Tensor) -> Tensor:
        """Return [m, B] float64: the log-probability of each row's labels, summed over its tokens, without a gradient.

        Args:
            labels: [B, T], the next token of every position; -100 for none.
        """
        with torch.no_grad(), self.members.bind(theta):
            hidden, output = self.head.hidden(inputs)
            found = _Terms(
                self.head.per_member(hidden, labels.shape[0]), labels.reshape(1, -1), labels.shape, len(theta)
            )
            return self._sums(found, output)

    def log_lik_of_texts(
        self,
        theta: Tensor,
        inputs: dict[str, Any],
        labels: Tensor,
        of_texts: Callable[[Tensor], Tensor],
        *,
        folded: bool,
    ) -> Tensor:
        """Return [m], a function of the log-probabilities of whole texts, differentiable in ``theta`` [m, d].

        The head runs twice on a few positions at a time: first for the log-probabilities L, and then for their
        gradient, with the weights that the function's derivatives in L give to the tokens.

        Args:
            labels: [B, T] (or [m * B, T] if folded), the next token of every position; -100 for none.
            of_texts: L [m, B] -> [m], differentiable, separately for each member.
        """
        members = len(theta)
        with self.members.bind(theta):
            hidden, output = self.head.hidden(inputs, folded=folded)
            rows = labels.shape[0] // members if folded else labels.shape[0]
            shape = (rows, labels.shape[1])
            found = _Terms(
                self.head.per_member(hidden, rows), labels.reshape(members if folded else 1, -1), shape, members
            )
            with torch.no_grad():
                sums = self._sums(found, output)
            with torch.enable_grad():
                leaf = sums.requires_grad_()
                value = of_texts(leaf)
                (slopes,) = torch.autograd.grad(value.sum(), leaf)
            result = value.detach().to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
            if torch.is_grad_enabled():
                places = torch.arange(found.labels.shape[1], device=labels.device).expand(members, -1)
                weights = slopes[:, found.rows]

                def weighted(logits: Tensor, places: Tensor) -> Tensor:
                    log_prob = _TOKENS.log_prob(logits, found.labels.gather(1, places))
                    return log_prob * weights.gather(1, places).to(log_prob.dtype)

                linear = self.head.log_lik(found.hidden, output, places, weighted)
                result = result + (linear - linear.detach())
            self.members.check_all_read()
        return result

    def _sums(self, terms: _Terms, output: Any) -> Tensor:
        """Return [m, B], the sums over each row's terms."""
        sums = terms.hidden.new_zeros(len(terms.labels), terms.num_rows, dtype=torch.float64)
        for start, stop in self.head.chunks(terms.hidden, terms.labels):
            log_prob = _TOKENS.log_prob(
                self.head.logits(terms.hidden[:, start:stop], output), terms.labels[:, start:stop]
            )
            sums.index_add_(1, terms.rows[start:stop], log_prob.double())
        return sums

    def _pass(self, theta: Tensor, inputs: dict[str, Any], cache: Any) -> tuple[Tensor, Any]:
        own = {} if cache is None else {CACHE: cache}
        with self.members.bind(theta):
            return self.head.hidden({**inputs, **own})
