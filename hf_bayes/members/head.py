"""The head of a causal language model, run on a few positions at a time, so that no [M, B, T, V] tensor exists.

The model's own forward runs both halves: its backbone once, then everything after the backbone (head, soft-capping,
logit scales) again and again with the backbone answering one chunk of its hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_bayes.members.engine import Members
from hf_bayes.members.trunk import num_rows_of

CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""float32 logits of one chunk, all members together: what fits the caches of a CPU, what keeps a GPU busy."""


class ChunkedHead:
    """Backbone and head of ``members.core`` apart.

    Raises:
        ValueError: if the core has no backbone of its own or no output embeddings.
    """

    def __init__(self, members: Members) -> None:
        core: Any = members.core
        self.members, self.backbone = members, core.base_model
        if self.backbone is core or core.get_output_embeddings() is None:
            raise ValueError(f"{type(core).__name__} is not a causal language model with a head of its own")
        # OPT and the decoders of Bart and its kin call their backbone's decoder, past the backbone
        decoder = getattr(self.backbone, "decoder", None)
        self._answering = [self.backbone, *([decoder] if isinstance(decoder, PreTrainedModel) else [])]
        inside = {id(module) for module in self.backbone.modules()}
        self.alike = not any(id(item.module) in inside for item in members.stacked)
        """Whether hidden states are the same for all members: only the head is random."""

    def hidden(self, inputs: dict[str, Any], *, folded: bool = False) -> tuple[Tensor, Any]:
        """The backbone's hidden states, [M * B, T, h] (or [B, T, h] if only the head is random), and its output."""
        output = self.members.forward(inputs, folded=folded, module=self.backbone)
        hidden = output.last_hidden_state
        if self.alike and not folded:
            hidden = hidden[: num_rows_of(inputs)].detach()  # nothing random precedes it, whatever requires grad
        return hidden, output

    def logits(self, hidden: Tensor, output: Any) -> Tensor:
        """[M, n, h] or, alike for all members, [1, n, h] -> [M, n, V]."""
        members = self.members.context.num_members
        answer = type(output)(last_hidden_state=hidden.reshape(-1, 1, hidden.shape[-1]))
        with ExitStack() as open_:
            for module in self._answering:
                open_.enter_context(_answering(module, answer))
            rows = self.members.run(self.members.core, {"input_ids": None, "use_cache": False}, hidden.shape[1], 1)
        return rows.logits.view(members, hidden.shape[1], rows.logits.shape[-1])

    def stream(self, hidden: Tensor, output: Any, num_rows: int, positions: Tensor | None = None) -> Iterator[tuple]:
        """Logits of all members, chunk by chunk.

        Args:
            hidden: from ``hidden``.
            output: from ``hidden``.
            num_rows: B.
            positions: flat indices b * T + t that are wanted; None means all.
        Yields:
            (indices [n], logits [M, n, V]).
        """
        flat = self.per_member(hidden, num_rows)
        wanted = torch.arange(flat.shape[1], device=hidden.device) if positions is None else positions
        for index in wanted.split(self.chunk_size(hidden)):
            yield index, self.logits(flat[:, index], output)

    def per_member(self, hidden: Tensor, num_rows: int) -> Tensor:
        """[M * B, T, h] -> [M, B * T, h], or [B, T, h] -> [1, B * T, h]."""
        return hidden.reshape(hidden.shape[0] // num_rows, -1, hidden.shape[-1])

    def chunk_size(self, hidden: Tensor) -> int:
        core: Any = self.members.core
        vocabulary = core.get_output_embeddings().weight.shape[0]
        budget = CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cpu"])
        return max(1, budget // (4 * vocabulary * self.members.context.num_members))

    def log_lik(self, hidden: Tensor, output: Any, labels: Tensor, log_prob: Callable) -> Tensor:
        """[M]: sum of the log-likelihoods of all terms, differentiable in theta and in the hidden states.

        Args:
            hidden: [M or 1, N, h].
            output: from ``hidden``.
            labels: [M, N].
            log_prob: (logits [M, n, V], labels [M, n]) -> [M, n].
        """
        tensors = self.members.context.tensors
        if not torch.is_grad_enabled():
            return torch.stack([p.sum(1) for p in self._pieces(hidden, output, labels, log_prob)]).sum(0)
        return _HeadLogLik.apply(self, output, labels, log_prob, tuple(tensors), hidden, *tensors.values())

    def chunks(self, hidden: Tensor, labels: Tensor) -> Iterator[tuple[int, int]]:
        """Where chunks of the N terms start and stop; one empty chunk if N = 0, which reads the head all the same."""
        size = self.chunk_size(hidden)
        for start in range(0, max(1, labels.shape[1]), size):
            yield start, min(start + size, labels.shape[1])

    def _pieces(self, hidden: Tensor, output: Any, labels: Tensor, log_prob: Callable) -> Iterator[Tensor]:
        for start, stop in self.chunks(hidden, labels):
            yield log_prob(self.logits(hidden[:, start:stop], output), labels[:, start:stop])


class _HeadLogLik(torch.autograd.Function):
    """Sum of log-likelihoods whose gradient is taken in the forward, chunk by chunk: none is kept, none recomputed."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, head: ChunkedHead, output: Any, labels: Tensor, log_prob: Callable, names: tuple[str, ...],
        hidden: Tensor, *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        context = head.members.context
        leaves = {n: t.detach().requires_grad_() for n, t in zip(names, tensors, strict=True)}
        saved = context.tensors, context.used
        context.tensors = leaves
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[5] else None
        grads: dict[str, Tensor] = {}
        total = torch.zeros(context.num_members, device=hidden.device, dtype=torch.float64)
        try:
            for start, stop in head.chunks(hidden, labels):
                piece = hidden[:, start:stop].detach().requires_grad_(grad_hidden is not None)
                context.used = set()
                with torch.enable_grad():
                    log_lik = log_prob(head.logits(piece, output), labels[:, start:stop]).sum(1)
                    used = sorted(context.used)
                    wanted = [leaves[name] for name in used] + ([piece] if grad_hidden is not None else [])
                    found = torch.autograd.grad(log_lik.sum(), wanted) if wanted else ()
                for name, grad in zip(used, found, strict=False):
                    grads[name] = grads[name] + grad if name in grads else grad
                if grad_hidden is not None:
                    grad_hidden[:, start:stop] = found[-1]
                total += log_lik.detach()
        finally:
            context.tensors, context.used = saved[0], saved[1] | context.used
        ctx.grad_hidden, ctx.grads = grad_hidden, [grads.get(name) for name in names]
        return total.to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple:  # type: ignore[no-untyped-def]
        def scale(grad: Tensor | None) -> Tensor | None:
            # each member's gradient stands on its own row, so its factor does too
            return None if grad is None else grad * upstream.to(grad.dtype).view(-1, *[1] * (grad.ndim - 1))

        return None, None, None, None, None, scale(ctx.grad_hidden), *(scale(grad) for grad in ctx.grads)


class _answering:
    """While open, the backbone returns ``answer`` to whatever it is asked."""

    def __init__(self, backbone: nn.Module, answer: Any) -> None:
        self.backbone, self.answer = backbone, answer

    def __enter__(self) -> None:
        self.before = self.backbone.__dict__.get("forward")
        self.backbone.forward = lambda *args, **kwargs: self.answer

    def __exit__(self, *error: object) -> None:
        del self.backbone.forward
        if self.before is not None:
            self.backbone.forward = self.before
