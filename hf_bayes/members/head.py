"""The head of a causal language model, run on a few positions at a time, so that no [M, B, T, V] tensor exists.

Both parts run in the model's own forward. The backbone runs once. Then everything after it (head, soft-capping, logit
scales) runs once per chunk of positions, while the backbone returns the hidden states of this chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_bayes.members.engine import Members
from hf_bayes.members.inputs import shape_of

CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Bytes of the float32 logits of one chunk, for all members together. On a CPU they fit the caches; on a GPU they keep
the device busy."""

LogProb = Callable[[Tensor, Tensor], Tensor]
"""(logits [M, n, V], labels [M, n]) -> [M, n], as ``Likelihood.log_prob``."""


class ChunkedHead:
    """The backbone and the head of ``members.core``, run separately.

    Raises:
        ValueError: if the core has no backbone of its own or no output embeddings.
    """

    def __init__(self, members: Members) -> None:
        core: Any = members.core
        self.members, self.backbone = members, core.base_model
        if self.backbone is core or core.get_output_embeddings() is None:
            raise ValueError(f"{type(core).__name__} is not a causal language model with a head of its own")
        # OPT and the decoders of the Bart family call the decoder of their backbone, and not the backbone
        decoder = getattr(self.backbone, "decoder", None)
        self._replaced = [self.backbone, *([decoder] if isinstance(decoder, PreTrainedModel) else [])]
        inside = {id(module) for module in self.backbone.modules()}
        self.alike = not any(id(item.module) in inside for item in members.stacked)
        """True if only the head is random, so that the hidden states are equal for all members."""

    def hidden(self, inputs: dict[str, Any], *, folded: bool = False) -> tuple[Tensor, Any]:
        """Return the hidden states of the backbone and its output.

        The hidden states are [M * B, T, h], or [B, T, h] if only the head is random.
        """
        if self.alike and not folded:
            output = self.members.run(self.backbone, inputs, *shape_of(inputs))
            return output.last_hidden_state.detach(), output  # no random parameter before it, so no gradient is needed
        output = self.members.forward(inputs, folded=folded, module=self.backbone)
        return output.last_hidden_state, output

    def logits(self, hidden: Tensor, output: Any) -> Tensor:
        """Return the logits [M, n, V] of hidden states [M, n, h], or [1, n, h] if they are equal for all members."""
        members = self.members.context.num_members
        fixed = type(output)(last_hidden_state=hidden.reshape(-1, 1, hidden.shape[-1]))
        with ExitStack() as stack:
            for module in self._replaced:
                stack.enter_context(_FixedOutput(module, fixed))
            rows = self.members.run(self.members.core, {"input_ids": None, "use_cache": False}, hidden.shape[1], 1)
        logits: Tensor = rows.logits
        return logits.view(members, hidden.shape[1], logits.shape[-1])

    def per_member(self, hidden: Tensor, num_rows: int) -> Tensor:
        """Reshape [M * B, T, h] to [M, B * T, h], or [B, T, h] to [1, B * T, h]."""
        return hidden.reshape(hidden.shape[0] // num_rows, -1, hidden.shape[-1])

    def chunk_size(self, hidden: Tensor) -> int:
        """Return the number of positions per chunk."""
        core: Any = self.members.core
        vocabulary: int = core.get_output_embeddings().weight.shape[0]
        budget = CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cpu"])
        return max(1, budget // (4 * vocabulary * self.members.context.num_members))

    def log_lik(self, hidden: Tensor, output: Any, labels: Tensor, log_prob: LogProb) -> Tensor:
        """Return the sum of the log-likelihoods of all terms, [M], differentiable in theta and in the hidden states.

        Args:
            hidden: [M or 1, N, h].
            output: from ``hidden``.
            labels: [M, N].
            log_prob: (logits [M, n, V], labels [M, n]) -> [M, n].
        """
        tensors = self.members.context.tensors
        if not torch.is_grad_enabled():
            return torch.stack([p.sum(1) for p in self._pieces(hidden, output, labels, log_prob)]).sum(0)
        apply: Callable[..., Tensor] = _HeadLogLik.apply
        return apply(self, output, labels, log_prob, tuple(tensors), hidden, *tensors.values())

    def chunks(self, hidden: Tensor, labels: Tensor) -> Iterator[tuple[int, int]]:
        """Yield the start and the end of each chunk of the N terms.

        For N = 0 there is one empty chunk, so that the head is read.
        """
        size = self.chunk_size(hidden)
        for start in range(0, max(1, labels.shape[1]), size):
            yield start, min(start + size, labels.shape[1])

    def _pieces(self, hidden: Tensor, output: Any, labels: Tensor, log_prob: LogProb) -> Iterator[Tensor]:
        for start, stop in self.chunks(hidden, labels):
            yield log_prob(self.logits(hidden[:, start:stop], output), labels[:, start:stop])


class _HeadLogLik(torch.autograd.Function):
    """The sum of log-likelihoods, with its gradient computed in the forward, chunk by chunk.

    So no chunk's logits are kept for the backward, and none are computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any, head: ChunkedHead, output: Any, labels: Tensor, log_prob: LogProb, names: tuple[str, ...],
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
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        def scale(grad: Tensor | None) -> Tensor | None:
            # the first dimension of a gradient is the member, and each member has its own factor
            return None if grad is None else grad * upstream.to(grad.dtype).view(-1, *[1] * (grad.ndim - 1))

        return None, None, None, None, None, scale(ctx.grad_hidden), *(scale(grad) for grad in ctx.grads)


class _FixedOutput:
    """A context manager in which the backbone returns ``output``, whatever its inputs are."""

    def __init__(self, backbone: nn.Module, output: Any) -> None:
        self.backbone, self.output = backbone, output

    def __enter__(self) -> None:
        self.before = self.backbone.__dict__.get("forward")
        self.backbone.forward = lambda *args, **kwargs: self.output

    def __exit__(self, *error: object) -> None:
        del self.backbone.forward
        if self.before is not None:
            self.backbone.forward = self.before
