"""Language models linearised in their random parameters.

A language model has an output for each word at every position, so neither J nor J V J' fits into memory. Its outputs
are drawn instead: f(x, mean) + J (theta_s - mean) of a draw theta_s is one Jacobian-vector product (``tangents``). It
is computed in forward mode, for all draws at once, since the member engine propagates tangents. If the head alone is
random there is a closed form (``ClosedHead``), as long as all pairs of words at one position fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.members.compat.transformers import attention_of
from hf_bayes.members.head import ChunkedHead
from hf_bayes.members.module_hooks import LayerHooks
from hf_bayes.members.quantised import foreign_linears, maps_one_tensor
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.linearised.output_covariance import JACOBIAN_BUDGET, head_covariance
from hf_bayes.models.linearised.outputs import Outputs, linear_head
from hf_bayes.uncertainty.likelihoods import widened

_AD: Any = forward_ad  # untyped in torch

DIFFERENTIABLE_ATTENTION = ("eager", "sdpa")
"""Implementations of attention that PyTorch can differentiate in forward mode."""


@contextmanager
def tangents(means: Tensor, theta: Tensor) -> Iterator[Tensor]:
    """Yield the means of draws ``theta`` [M, d], with tangents towards the draws, until the end of the block.

    All that is computed from them carries the derivative in that direction. Logits carry f(x, mean) and
    J (theta_s - mean), which ``drawn`` adds up. Attention is composed of matrix products by PyTorch, since only this
    implementation has a forward-mode derivative on every device.

    Args:
        means: [M, d], for each draw the mean of the Gaussian it was drawn from.
    """
    theta = theta.detach()
    with torch.inference_mode(False), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _AD.dual_level():
        mean = means.to(theta, copy=True)
        dual: Tensor = _AD.make_dual(mean, theta.clone() - mean)
        yield dual


def means_of_draws(means: Tensor, model: BayesianModel) -> Tensor:
    """Return [M, d], for each member of the model the mean of the Gaussian it was drawn from, given all means [K, d].

    ``Gaussian.sample`` deals draws to components in turn, and ``spread_members`` deals draws to processes.
    """
    numbers = model.member_group.rank * model.num_members + torch.arange(model.num_members, device=means.device)
    return means[numbers % len(means)]


def drawn(logits: Tensor) -> Tensor:
    """Return f(x, mean) + J (theta_s - mean) for logits of a ``tangents`` block, and other logits unchanged."""
    value, tangent = _unpacked(logits)
    return value if tangent is None else widened(value) + widened(tangent)


def refuse_backwards_only(model: BayesianModel, run: Any) -> None:
    """Raise if PyTorch cannot differentiate a model in forward mode, or a quantised layer drops tangents.

    Args:
        run: runs a forward pass within ``tangents``.
    """
    attention = attention_of(model.core.config)
    if attention not in (None, *DIFFERENTIABLE_ATTENTION):
        raise ValueError(
            f"linearised predictions differentiate attention forwards, which {' and '.join(DIFFERENTIABLE_ATTENTION)} "
            f"allow, got attn_implementation={attention!r}: load the base model with attn_implementation='sdpa', or "
            "predict by members"
        )
    hooks = [module.register_forward_hook(_TangentCheck(path)) for path, module in foreign_linears(model.model)]
    try:
        run()
    except RuntimeError as error:  # an operation or an autograd function has no forward-mode derivative
        if isinstance(error, NotImplementedError) or "jvp" in str(error):
            raise ValueError(
                f"linearised predictions differentiate {type(model.core).__name__} forwards, and one of its operations "
                f"cannot be ({str(error).splitlines()[0]:.200}): predict by members"
            ) from error
        raise
    finally:
        for hook in hooks:
            hook.remove()


class _TangentCheck:
    """Check that forward-mode differentiation propagates tangents through a linear layer."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not maps_one_tensor(args, output):
            return
        given, found = (_unpacked(value)[1] for value in (args[0], output))
        if given is not None and bool(given.any()) and (found is None or not bool(found.any())):
            raise ValueError(
                f"{self.path} ({type(module).__module__}.{type(module).__name__}) cannot be differentiated forwards: a "
                "linearised model would not see what is random below it. Quantise the base in another way "
                "(docs/models.md), or predict by members"
            )


def _unpacked(value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a tensor without its tangent, and the tangent; outside of every ``tangents`` block there is none."""
    primal, tangent = _AD.unpack_dual(value)
    return primal, tangent


class ClosedHead:
    """The covariance J V J' of a language model with a random head only, position by position.

    Raises:
        ValueError: if other parameters are random, or the pairs of words of a position are too many to be held.
    """

    def __init__(self, model: BayesianModel, head: ChunkedHead, link: str) -> None:
        self.head, self.layout = head, model.layout
        self.module: Any = model.core.get_output_embeddings()
        hooks = LayerHooks(model.model, model.layout.names)
        layer = linear_head(hooks, model.layout)
        instead = (
            f"{link} needs a covariance of all words at a position: take link='monte_carlo', whose draws need none"
        )
        if layer is None or layer.module is not self.module:
            raise ValueError(
                f"link {link!r} has a closed form for a language model whose linear head alone is random, got "
                f"{len(model.layout.names)} random tensors, first {model.layout.names[0]}: {instead}"
            )
        self.weight = layer.names["weight"]
        self.num_words = model.layout.named_shapes[self.weight][0]
        if self.num_words**2 > JACOBIAN_BUDGET:
            raise ValueError(
                f"{self.num_words} words have {self.num_words**2} pairs at each position, more than the "
                f"{JACOBIAN_BUDGET} numbers that are held at once: {instead}"
            )

    def outputs(
        self, gaussian: Gaussian, hidden: Tensor, output: Any, num_rows: int, positions: Tensor
    ) -> Iterator[tuple[Tensor, Outputs]]:
        """Yield (indices [n], the outputs [K, n, V] there), a chunk at a time.

        Args:
            hidden, output, num_rows, positions: as in ``HiddenStates``; hidden states [B, T, h]. Positions are flat.
        Raises:
            ValueError: if the model's logits differ from the outputs of its head.
        """
        flat, means = self.head.per_member(hidden, num_rows), gaussian.means
        for index in torch.split(positions, self._chunk_size(gaussian)):
            with self.head.members.bind(means):
                logits, features = self._logits_and_features(flat[:, index], output)
            spread = [
                head_covariance(covariance, self.layout, features.to(means.dtype), weight=self.weight)
                for covariance in gaussian.covariances
            ]
            yield index, Outputs(widened(logits).to(means.dtype), torch.stack(spread))

    def _chunk_size(self, gaussian: Gaussian) -> int:
        # with a full covariance the Jacobian of a position is written out: V x d numbers, fewer than the d x d of V
        width = self.layout.dim if gaussian.covariances[0].kind == "full" else self.num_words
        return max(1, JACOBIAN_BUDGET // (len(gaussian.means) * self.num_words * width))

    def _logits_and_features(self, hidden: Tensor, output: Any) -> tuple[Tensor, Tensor]:
        """Return the logits [K, n, V] and the inputs [n, h] of the head."""
        seen: list[tuple[Tensor, Tensor]] = []
        with self.module.register_forward_hook(lambda module, args, answer: seen.append((args[0], answer))):
            logits = self.head.logits(hidden, output)
        (features, answer), *more = seen
        if more or not torch.equal(answer.reshape(logits.shape), logits):
            raise ValueError(
                f"{type(self.head.members.core).__name__} changes what its head gives (by a scale, or soft-capping), "
                "so that its logits are not linear in the head: take link='monte_carlo'"
            )
        return logits, features.reshape(hidden.shape[1], features.shape[-1])
