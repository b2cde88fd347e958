"""The gradient of a log-likelihood, and the interface of ``ModelObjective`` for modules that cannot import it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_bayes.members.mesh import ChainMesh
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.data_access import DataAccess
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.private_rows import PrivateRows


class MemberPass(NamedTuple):
    """One pass of some members over a micro-batch.

    Attributes:
        members: the chains of the pass.
        loss: [m] minus the log-likelihood of the micro-batch, summed over its terms.
        grad: [m, d] the gradient of the loss; None if it was not requested.
        anchor_grad: [m, d] or [m, J, d] the gradient at the anchor; None without one.
    """

    members: slice
    loss: Tensor
    grad: Tensor | None
    anchor_grad: Tensor | None


def value_and_gradient(
    loss_of: Callable[[Tensor], Tensor], theta: Tensor, *, gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return losses [m] at ``theta`` [m, d], and the gradient of each in its own row; None if it is not requested.

    This is the only place that differentiates a model's log-likelihood in theta. The passes for the curvature
    differentiate it in the weights of the single model (``curvature_pass``).
    """
    leaf = theta.detach().requires_grad_(gradient)
    with torch.set_grad_enabled(gradient):
        loss = loss_of(leaf)
        if gradient:
            loss.sum().backward()
    return loss.detach(), leaf.grad


class PassingObjective(Protocol):
    """A log-likelihood that yields its gradient on a micro-batch, a few chains at a time.

    The attributes are arguments of ``ModelObjective``, where they are explained.
    """

    model: BayesianModel
    scale: DataScale
    mesh: ChainMesh
    chains: range
    shared: bool
    dropout: bool
    in_float64: bool
    returns_batches: bool
    measures_noise: bool
    seed: int
    private: PrivateRows | None
    data: DataAccess | None

    def prepare(self, batch: Any) -> Any:
        """Return a batch on the device."""
        ...

    def member_chunks(self, batch: dict[str, Any]) -> list[slice]:
        """Return the members of each pass."""
        ...

    def passes(
        self,
        theta: Tensor,
        batch: Any,
        *,
        gradient: bool,
        step: int,
        micro: int,
        chunks: list[slice] | None = None,
        anchor: Tensor | None = None,
    ) -> Iterator[MemberPass]:
        """Yield log-likelihood and gradient of a prepared micro-batch at ``theta`` [M, d]."""
        ...
