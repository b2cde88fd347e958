"""A model linearised in its random parameters: f(x, theta) ~ N(f(x, mean), J V J'), theta ~ N(mean, V).

J [C, d] is the Jacobian of the outputs of a row at the mean, found in the live model showing that one member. Where the
random parameters are a linear head, J is the head's input and nothing is differentiated; elsewhere there is a
backward pass for each output, through which taps see the gradient of every row on its own.

A language model has a word for each output at every position, and neither J nor J V J' fits anywhere. Its outputs are
drawn in place: f(x, mean) + J (theta_s - mean) of each draw theta_s is one Jacobian-vector product (``tangents``), in
forward mode and for all draws at once, since the members' engine carries tangents along. Of a head alone there is the
closed form (``ClosedHead``), while the pairs of words of one position can be held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_bayes.covariance import Covariance, Diagonal, Kronecker, LowRank
from hf_bayes.likelihood import widened
from hf_bayes.members.head import ChunkedHead
from hf_bayes.members.plain import plain
from hf_bayes.members.quantised import foreign_linears
from hf_bayes.members.taps import Share, Tap, Taps, pieces
from hf_bayes.members.trunk import num_positions_of, num_rows_of
from hf_bayes.posterior import Gaussian
from hf_bayes.predictive import LINKS
from hf_bayes.subspace import Layout

if TYPE_CHECKING:
    from hf_bayes.classification import BayesianClassifier
    from hf_bayes.model import BayesianModel

JACOBIAN_BUDGET = 1 << 26
"""Numbers of Jacobians held at once; a single row is never split."""

DIFFERENTIABLE_ATTENTION = ("eager", "sdpa")
"""Implementations of attention that PyTorch can differentiate forwards."""


class Outputs(NamedTuple):
    """K Gaussians over the outputs, of equal weight.

    Attributes:
        mean: [K, B, C], of taggers [K, B, T, C].
        covariance: [K, B, C, C] or [K, B, T, C, C], or as the mean where outputs are independent.
    """

    mean: Tensor
    covariance: Tensor


def gaussian_of(model: BayesianModel, link: str) -> Gaussian:
    """What a model that is to predict linearised, by ``link``, is linearised around.

    Raises:
        ValueError: for an unknown link, or a posterior that is no Gaussian.
    """
    if link not in LINKS:
        raise ValueError(f"link must be one of {', '.join(LINKS)}, got {link!r}")
    if model.posterior is None or not isinstance(model.posterior.approximation, Gaussian):
        found = "none" if model.posterior is None else f"one of {model.posterior.config.approximation}"
        raise ValueError(
            f"linearise needs a Gaussian posterior, got {found}: load one that fit_laplace or mean_field has made, "
            "or predict by members"
        )
    return model.posterior.approximation


def gaussian_outputs(model: BayesianClassifier, gaussian: Gaussian, inputs: dict[str, Any]) -> Outputs:
    """The outputs for a batch without labels, one Gaussian for each component of ``gaussian``.

    Those of a tagger are found position by position: T times C backward passes, and no covariance between positions.

    Memory: Jacobians of as many rows as keep within ``JACOBIAN_BUDGET``.

    Raises:
        ValueError: for outputs that are neither [B, C] nor [B, T, C].
    """
    taps = Taps(model.model, model.layout.names)
    head = _linear_head(taps, model.layout)
    components = []
    for mean, covariance in zip(gaussian.means, gaussian.covariances, strict=True):
        mean = mean.to(model.theta)
        with torch.inference_mode(False), torch.enable_grad(), plain(model.members, mean), taps.open():
            size = None if head else max(1, JACOBIAN_BUDGET // (model.layout.dim * model.config.num_labels))
            parts = [_of_batch(model, taps, head, mean, covariance, part) for part in _rows_of(inputs, size)]
        components.append([torch.cat(pieces) for pieces in zip(*parts, strict=True)])
    return Outputs(*(torch.stack(pieces) for pieces in zip(*components, strict=True)))


def _of_batch(
    model: BayesianClassifier, taps: Taps, head: Tap | None, like: Tensor, covariance: Covariance, inputs: dict
) -> tuple[Tensor, Tensor]:
    rows = num_rows_of(inputs)
    taps.begin(rows, num_positions_of(inputs), inputs.get("attention_mask"))
    logits = model._logits(inputs, 1)[0]
    if logits.ndim not in (2, 3):
        raise ValueError(
            f"linearised predictions need outputs [B, C] for each example, or [B, T, C] for each token, got "
            f"{list(logits.shape)} from {type(model.core).__name__}: predict by members"
        )

    def spread_of(outputs: Tensor) -> Tensor:
        features = None if head is None else _features(taps, outputs, like)
        if head is not None and features is not None:
            return head_covariance(covariance, model.layout, features, weight=head.names["weight"])
        return covariance_of_outputs(covariance, model.layout, _jacobian(taps, outputs, model.layout, like))

    spread = spread_of(logits) if logits.ndim == 2 else torch.stack([spread_of(one) for one in logits.unbind(1)], 1)
    return widened(logits.detach()).to(like.dtype), spread


def covariance_of_outputs(covariance: Covariance, layout: Layout, jacobian: Mapping[str, Tensor]) -> Tensor:
    """[B, C, C]: J V J' from {name: [B, C, *shape]}."""
    flat = layout.flatten(jacobian)
    return flat @ covariance.product(flat).mT


def head_covariance(covariance: Covariance, layout: Layout, features: Tensor, *, weight: str) -> Tensor:
    """[B, C, C] J V J' of outputs W phi (+ b), or its diagonal [B, C] where elements are independent.

    With a Kronecker-factored V of W, (L (x) R) diag(values) (L (x) R)', it is L diag(values (R' phi)^2) L': for values
    that are a product, (phi' A phi) B.

    Args:
        features: [B, n] phi.
        weight: name of W [C, n]; the other tensor of the layout, if there is one, is b [C].
    """
    num_outputs = layout.shapes[layout.names.index(weight)][0]
    if isinstance(covariance, Diagonal):
        spread = features.new_zeros(len(features), num_outputs)
        for name, std in layout.unflatten(covariance.std).items():
            spread += features.square() @ std.square().mT if name == weight else std.square()
        return spread
    if isinstance(covariance, Kronecker):
        spread = features.new_zeros(len(features), num_outputs, num_outputs)
        for name, block in zip(layout.names, covariance.blocks, strict=True):
            if isinstance(block, Tensor):
                block = block.view(num_outputs, -1)
                each = features.square() @ block.square().mT if name == weight else block.square().mT
                spread += torch.diag_embed(each)
                continue
            turned = features if block.right is None else features @ block.right
            values = turned.square() @ block.variances.mT
            spread += torch.diag_embed(values) if block.left is None else (block.left * values[:, None]) @ block.left.mT
        return spread
    if isinstance(covariance, LowRank):
        # J S (I + Q diag(c - 1) Q') S J': the first part is a diagonal covariance, the second has r columns J S Q
        spread = torch.diag_embed(head_covariance(Diagonal(covariance.std), layout, features, weight=weight))
        columns = layout.unflatten((covariance.std[:, None] * covariance.basis).mT)  # {name: [r, *shape]}
        read: Any = sum(
            torch.einsum("bn,rcn->bcr", features, part) if name == weight else part.mT for name, part in columns.items()
        )
        return spread + (read * (covariance.scale - 1)) @ read.mT
    eye = torch.eye(num_outputs, dtype=features.dtype, device=features.device)
    jacobian = {name: eye.expand(len(features), -1, -1) for name in layout.names}
    outer = eye[None, :, :, None] * features[:, None, None, :]
    return covariance_of_outputs(covariance, layout, jacobian | {weight: outer})


@contextmanager
def tangents(gaussian: Gaussian, theta: Tensor, *, first: int = 0) -> Iterator[Tensor]:
    """Until the end of the block, ``theta`` [M, d] as draws of a linearised model: its mean, moving towards each draw.

    Whatever is computed from what the block is given carries the derivative in that direction along: of the logits,
    f(x, mean) and J (theta_s - mean), which ``drawn`` adds up. Attention takes PyTorch's own composition of products,
    the one that has a derivative forwards on every device.

    Args:
        theta: drawn from ``gaussian``, as ``Gaussian.sample`` deals draws to components.
        first: number of the first draw.
    """
    theta = theta.detach()
    means = gaussian.means.to(theta)
    component = torch.arange(first, first + len(theta), device=theta.device) % len(means)
    with torch.inference_mode(False), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        mean = means[component]
        yield forward_ad.make_dual(mean, theta.clone() - mean)


def drawn(logits: Tensor) -> Tensor:
    """f(x, mean) + J (theta_s - mean), of logits that were computed within ``tangents``; as they are elsewhere."""
    value, tangent = forward_ad.unpack_dual(logits)  # outside of every level there is none
    return value if tangent is None else widened(value) + widened(tangent)


def refuse_backwards_only(model: BayesianModel, run: Any) -> None:
    """Raise where PyTorch cannot differentiate a language model forwards, or a layer of few bits does not say so.

    Args:
        run: a forward within ``tangents``.
    """
    attention = getattr(model.core.config, "_attn_implementation", None)
    if attention not in (None, *DIFFERENTIABLE_ATTENTION):
        raise ValueError(
            f"linearised predictions differentiate attention forwards, which {' and '.join(DIFFERENTIABLE_ATTENTION)} "
            f"allow, got attn_implementation={attention!r}: load the base model with attn_implementation='sdpa', or "
            "predict by members"
        )
    hooks = [module.register_forward_hook(_Moving(path)) for path, module in foreign_linears(model.model)]
    try:
        run()
    except RuntimeError as error:  # of an operation, or of an autograd function, without a derivative forwards
        if isinstance(error, NotImplementedError) or "jvp" in str(error):
            raise ValueError(
                f"linearised predictions differentiate {type(model.core).__name__} forwards, and one of its operations "
                f"cannot be ({str(error).splitlines()[0]:.200}): predict by members"
            ) from error
        raise
    finally:
        for hook in hooks:
            hook.remove()


class _Moving:
    """Of a linear layer: what comes out moves where what went in does."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        if len(args) != 1 or not all(isinstance(value, Tensor) for value in (*args, output)):
            return
        given, found = (forward_ad.unpack_dual(value).tangent for value in (args[0], output))
        if given is not None and bool(given.any()) and (found is None or not bool(found.any())):
            raise ValueError(
                f"{self.path} ({type(module).__module__}.{type(module).__name__}) cannot be differentiated forwards: a "
                "linearised model would not see what is random below it. Quantise the base in another way "
                "(docs/models.md), or predict by members"
            )


class ClosedHead:
    """J V J' of a language model whose one random module is its head, position by position.

    Raises:
        ValueError: if other parameters are random, or the pairs of words of a position are too many to be held.
    """

    def __init__(self, model: BayesianModel, head: ChunkedHead, link: str) -> None:
        self.head, self.layout = head, model.layout
        self.module: Any = model.core.get_output_embeddings()
        taps = Taps(model.model, model.layout.names)
        tap = _linear_head(taps, model.layout)
        instead = (
            f"{link} needs a covariance of all words at a position: take link='monte_carlo', whose draws need none"
        )
        if tap is None or tap.module is not self.module:
            raise ValueError(
                f"link {link!r} has a closed form for a language model whose linear head alone is random, got "
                f"{len(model.layout.names)} random tensors, first {model.layout.names[0]}: {instead}"
            )
        self.weight = tap.names["weight"]
        self.num_words = model.layout.named_shapes[self.weight][0]
        if self.num_words**2 > JACOBIAN_BUDGET:
            raise ValueError(
                f"{self.num_words} words have {self.num_words**2} pairs at each position, more than the "
                f"{JACOBIAN_BUDGET} numbers that are held at once: {instead}"
            )

    def outputs(
        self, gaussian: Gaussian, hidden: Tensor, output: Any, num_rows: int, positions: Tensor
    ) -> Iterator[tuple[Tensor, Outputs]]:
        """Chunk by chunk, (indices [n], the outputs [K, n, V] there).

        Args:
            hidden, output, num_rows, positions: as of ``ChunkedHead.stream``; hidden states [B, T, h].
        Raises:
            ValueError: if the model's logits are not what its head gives.
        """
        flat, means = self.head.per_member(hidden, num_rows), gaussian.means
        for index in positions.split(self._chunk_size(gaussian)):
            with self.head.members.bind(means):
                logits, features = self._logits_and_features(flat[:, index], output)
            spread = [
                head_covariance(covariance, self.layout, features.to(means.dtype), weight=self.weight)
                for covariance in gaussian.covariances
            ]
            yield index, Outputs(widened(logits).to(means.dtype), torch.stack(spread))

    def _chunk_size(self, gaussian: Gaussian) -> int:
        # of a full covariance the Jacobian of a position is written out: V x d numbers, fewer than the d x d of V
        width = self.layout.dim if gaussian.covariances[0].kind == "full" else self.num_words
        return max(1, JACOBIAN_BUDGET // (len(gaussian.means) * self.num_words * width))

    def _logits_and_features(self, hidden: Tensor, output: Any) -> tuple[Tensor, Tensor]:
        """[K, n, V] and the [n, h] that the head was given."""
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


def _linear_head(taps: Taps, layout: Layout) -> Tap | None:
    """The one linear module that owns all random parameters, if there is such a module."""
    if len(taps.taps) != 1:
        return None
    (tap,) = taps.taps
    return tap if tap.weight is not None and not tap.transposed and tap.reader is tap.module else None


def _features(taps: Taps, logits: Tensor, like: Tensor) -> Tensor | None:
    """[B, n]: what the linear module was given where its output is the logits; None if the logits are made of it."""
    found: list[Share] = []
    taps.listen(found.append, first=True)
    weights = torch.arange(1, logits.shape[-1] + 1, dtype=logits.dtype, device=logits.device)
    torch.autograd.backward(logits, weights.expand_as(logits), inputs=[taps.anchor], retain_graph=True)
    if len(found) != 1:
        return None
    (share,) = found
    read = share.g.ne(0).any(-1)
    if share.g.shape[-1] != len(weights) or not bool((read.sum(1) == 1).all()):
        return None
    return share.x[read].to(like.dtype) if bool((share.g[read] == weights).all()) else None


def _jacobian(taps: Taps, logits: Tensor, layout: Layout, like: Tensor) -> dict[str, Tensor]:
    """{name: [B, C, *shape]}, by a backward pass for each output."""
    rows, num_outputs = logits.shape
    found = {name: like.new_zeros(rows, num_outputs, *shape) for name, shape in layout.named_shapes.items()}
    for output in range(num_outputs):

        def add(share: Share, output: int = output) -> None:
            for name, gradient in share.tap.row_gradients(share.x, share.g, like.dtype).items():
                found[name][share.rows, output] += gradient

        taps.listen(add, first=output == 0)
        cotangent = torch.zeros_like(logits)
        cotangent[:, output] = 1
        torch.autograd.backward(logits, cotangent, inputs=[taps.anchor], retain_graph=True)
    return found


def _rows_of(inputs: dict[str, Any], size: int | None) -> Iterator[dict[str, Any]]:
    """The batch in pieces of ``size`` rows; whole if that is None."""
    # a tensor of inference mode cannot be part of a graph, its copy can
    yield from pieces(
        {k: v.clone() if isinstance(v, Tensor) and v.is_inference() else v for k, v in inputs.items()}, size
    )
