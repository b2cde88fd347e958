"""A model's log-likelihood and its gradient on the micro-batches of one update."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_bayes.core.types import Evaluation, Info
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.gradient_variance import BetweenBatches, between_parts
from hf_bayes.objectives.passes import MemberPasses
from hf_bayes.objectives.private_rows import PrivateRows


@dataclass(frozen=True)
class ModelOfUpdate:
    """A model's log-likelihood on the micro-batches of one update, callable as ``core.types.Evaluate``.

    Attributes:
        passes: the passes of the chains of this process.
        batches: the micro-batches of this process.
        step: the number of updates that the run has done before, for dropout masks.
        terms: [M] the number of likelihood terms of the update.
        scale: the size of the data and of an update.
        private: the rows of this process, if processes keep their rows to themselves; otherwise None.
        in_float64: log-likelihoods stay in float64.
        returns_batches: an evaluation has ``batch_log_lik``.
        measures_noise: an evaluation with a gradient has ``grad_variance``, if it has two micro-batches or more.
    """

    passes: MemberPasses
    batches: list[Any]
    step: int
    terms: Tensor
    scale: DataScale
    private: PrivateRows | None
    in_float64: bool
    returns_batches: bool
    measures_noise: bool

    @property
    def _count(self) -> int:
        """The number of micro-batches of all processes."""
        return len(self.batches) * (self.passes.mesh.data_size if self.private is None else 1)

    @cached_property
    def _mine(self) -> dict[int, Any]:
        """The micro-batches of this process by their places among those of all processes."""
        mesh = self.passes.mesh
        if self.private is not None:  # each process has a part in every batch
            return dict(enumerate(self.batches))
        # processes that share chains take turns
        return dict(zip(range(mesh.data_rank, self._count, mesh.data_size), self.batches, strict=True))

    def info(self) -> Info:
        """Return no diagnostics."""
        return {}

    def __call__(
        self,
        theta: Tensor,
        *,
        gradient: bool = True,
        batches: slice | None = None,
        split_rows: bool = False,
        anchor: Tensor | None = None,
    ) -> Evaluation:
        """Return the log-likelihood and its gradient at ``theta`` [M, d], on the scale of all data."""
        passes, sizes = self.passes, self.passes.model.layout.sizes
        chosen = range(self._count)[slice(None) if batches is None else batches]
        log_liks = torch.zeros(len(theta), self._count, dtype=torch.float64, device=theta.device)
        grad = torch.zeros_like(theta) if gradient else None
        anchor_grad = None if anchor is None else torch.zeros_like(anchor)
        noise = BetweenBatches(theta, sizes) if self.measures_noise and self._count > 1 and gradient else None
        for micro, place in enumerate(place for place in chosen if place in self._mine):
            batch = passes.prepare(self._mine[place])
            options: dict[str, Any] = {"gradient": gradient, "step": self.step, "micro": micro, "anchor": anchor}
            for members, loss, part, beside in passes.of_batch(theta, batch, **options):
                log_liks[members, place] -= loss
                if anchor_grad is not None and beside is not None:
                    anchor_grad[members] -= beside
                if grad is not None and part is not None:
                    grad[members] -= part
                    if noise is not None:
                        noise.add(members, part)
        variance = None
        if split_rows and grad is not None and self._count == 1:
            variance = self._variance_between_parts(theta, -grad)
        log_liks = log_liks[:, chosen.start : chosen.stop].contiguous()
        if self.private is not None:
            log_liks = self.private.contribution(log_liks)
            grad = None if grad is None else self.private.weight * grad
            anchor_grad = None if anchor_grad is None else self.private.weight * anchor_grad
        return self._on_all_data(log_liks, grad, anchor_grad, noise, variance, len(chosen))

    def _variance_between_parts(self, theta: Tensor, grad: Tensor) -> Tensor | None:
        """Return the variance of ``grad`` [M, d], the gradient of minus the log-likelihood of a single micro-batch."""
        passes, batch = self.passes, self.passes.prepare(self._mine[0])
        # chunks as for the whole batch: a pass of fewer rows with more members would need more memory
        options: dict[str, Any] = {"gradient": True, "step": self.step, "chunks": passes.member_chunks(batch)}
        return between_parts(
            passes.model,
            batch,
            grad,
            lambda part, number: passes.of_batch(theta, part, micro=number, **options),
            num_groups=passes.num_groups,
        )

    def _on_all_data(
        self,
        log_liks: Tensor,
        grad: Tensor | None,
        anchor_grad: Tensor | None,
        noise: BetweenBatches | None,
        variance: Tensor | None,
        num_chosen: int,
    ) -> Evaluation:
        """Sum over the processes that share these chains, and scale the sums to all data."""
        mesh, share, terms = self.passes.mesh, num_chosen / self._count, self.terms.double().clamp_min(1)
        # all that processes with other rows of these chains exchange: K numbers for each chain, and the gradient
        log_liks = mesh.sum_over_data(log_liks)
        scale = torch.as_tensor(self.scale.factor(terms) / share, dtype=torch.float64, device=log_liks.device)
        scale = scale.view(-1, 1)
        if grad is not None:
            mesh.sum_over_data(grad)
            if noise is not None:
                variance = noise.of_sum(grad, mesh.sum_over_data)
            grad *= scale.to(grad.dtype)
        if anchor_grad is not None:
            mesh.sum_over_data(anchor_grad)
            anchor_grad *= scale.view(-1, *[1] * (anchor_grad.ndim - 1)).to(anchor_grad.dtype)
        columns = num_chosen * scale * log_liks if self.returns_batches else None
        log_lik = scale[:, 0] * log_liks.sum(1)
        loss = -log_liks.sum(1) / (share * terms)
        if variance is not None:
            variance = scale.to(variance) ** 2 * variance
        # a kernel accepts by differences below one nat, and float32 rounds energies near 1e7 to whole nats
        log_lik = log_lik if self.in_float64 or grad is None else log_lik.to(grad.dtype)
        return Evaluation(log_lik, grad, variance, columns, loss, anchor_grad)
