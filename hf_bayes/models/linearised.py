"""A model linearised in its random parameters: f(x, theta) ~ N(f(x, mean), J V J'), theta ~ N(mean, V).

J [C, d] is the Jacobian of the outputs of a row at the mean, found in the live model showing that one member. Where the
random parameters are a linear head, J is the head's input and nothing is differentiated; elsewhere there is a
backward pass for each output, through which taps see the gradient of every row on its own.

Language models, whose outputs are words at positions and too many for J, are the matter of ``linearised_lm``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import Covariance, Diagonal, Kronecker, LowRank, moved
from hf_bayes.members.module_hooks import Share, Tap, Taps, pieces
from hf_bayes.members.single_member import plain
from hf_bayes.members.trunk import num_positions_of, num_rows_of
from hf_bayes.models.base import BayesianModel
from hf_bayes.uncertainty.gaussian_links import LINKS
from hf_bayes.uncertainty.likelihoods import widened

JACOBIAN_BUDGET = 1 << 26
"""Numbers of Jacobians held at once; a single row is never split."""


class Outputs(NamedTuple):
    """K Gaussians over the outputs, of equal weight.

    Attributes:
        mean: [K, B, C], of taggers [K, B, T, C].
        covariance: [K, B, C, C] or [K, B, T, C, C], or as the mean where outputs are independent.
    """

    mean: Tensor
    covariance: Tensor


@dataclass
class Linearisation:
    """How a model predicts that is linearised.

    Attributes:
        gaussian: what its parameters are drawn from.
        link: of ``predictive.LINKS``.
    """

    gaussian: Gaussian
    link: str

    def gaussian_at(self, theta: Tensor) -> Gaussian:
        """The Gaussian where ``theta`` is and in its dtype, which it keeps until the model moves on."""
        means = self.gaussian.means
        if (means.device, means.dtype) != (theta.device, theta.dtype):
            self.gaussian = moved(self.gaussian, theta)
        return self.gaussian


def linearisation_of(model: BayesianModel, link: str) -> Linearisation:
    """Of a model that is to predict linearised, by ``link``.

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
    return Linearisation(model.posterior.approximation, link)


def gaussian_outputs(model: BayesianModel, gaussian: Gaussian, inputs: dict[str, Any]) -> Outputs:
    """The outputs for a batch without labels, one Gaussian for each component of ``gaussian``.

    Those of a tagger are found position by position: T times C backward passes, and no covariance between positions.

    Memory: Jacobians of as many rows as keep within ``JACOBIAN_BUDGET``.

    Raises:
        ValueError: for outputs that are neither [B, C] nor [B, T, C].
    """
    taps = Taps(model.model, model.layout.names)
    head = linear_head(taps, model.layout)
    components = []
    for mean, covariance in zip(gaussian.means, gaussian.covariances, strict=True):
        mean = mean.to(model.theta)
        with torch.inference_mode(False), torch.enable_grad(), plain(model.members, mean), taps.open():
            size = None if head else max(1, JACOBIAN_BUDGET // (model.layout.dim * model.config.num_labels))
            parts = [_of_batch(model, taps, head, mean, covariance, part) for part in _rows_of(inputs, size)]
        components.append([torch.cat(pieces) for pieces in zip(*parts, strict=True)])
    return Outputs(*(torch.stack(pieces) for pieces in zip(*components, strict=True)))


def _of_batch(
    model: BayesianModel, taps: Taps, head: Tap | None, like: Tensor, covariance: Covariance, inputs: dict
) -> tuple[Tensor, Tensor]:
    rows = num_rows_of(inputs)
    taps.begin(rows, num_positions_of(inputs), inputs.get("attention_mask"))
    logits = model.members.logits(inputs)[0]
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


def linear_head(taps: Taps, layout: Layout) -> Tap | None:
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
