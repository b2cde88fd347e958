"""A model linearised in its random parameters: f(x, theta) ~ N(f(x, mean), J V J'), theta ~ N(mean, V).

J [C, d] is the Jacobian of a row's outputs at the mean. The live model shows the mean as its one member. If the random
parameters are a linear head, J is the head's input and nothing is differentiated. Otherwise there is a backward pass
for each output, in which hooks read the input and the output gradient of every layer (``layer_covariance``).

A language model has too many outputs for J, one for each word at each position: see ``linearised.language``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.core.tensors import tensors_in, with_tensors
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import Covariance, moved
from hf_bayes.members.inputs import shape_of_texts
from hf_bayes.members.module_hooks import HookedLayer, LayerHooks, LayerRecord, pieces
from hf_bayes.members.single_member import as_single_model
from hf_bayes.members.sparse_backward import skipping_zeros
from hf_bayes.methods.registry import names_with
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.linearised.layer_covariance import LayerReads, covariance_of_layers, over_inputs, read_positions
from hf_bayes.models.linearised.output_covariance import head_covariance
from hf_bayes.uncertainty.gaussian_links import LINKS
from hf_bayes.uncertainty.likelihoods import widened

RECORD_BUDGET = {"cpu": (1 << 24, 1 << 25)}
"""The least and the most elements in the inputs and output gradients of layers that are held at once, by estimate.

Between the two, a model may hold as many as it has weights. On a CPU, few positions at once take longer for each
position if layers are wide. With more elements, the pass of a large model takes more memory than docs/single_pass.md
says. Other devices, which small products leave idle, have ``OTHER_BUDGET``.
"""

OTHER_BUDGET = (1 << 26, 1 << 26)


@dataclass(frozen=True)
class Directions:
    """The directions of the outputs in which a variance is computed; the others get the mean of these variances.

    Attributes:
        choose: the outputs [B, C] at the mean -> orthonormal directions U [B, C, K].
        number: K.
        factors: {path of a layer, without its LoRA factor: the factor of the variance from its weights}; 1 if missing.
    """

    choose: Callable[[Tensor], Tensor]
    number: int
    factors: Mapping[str, float] = field(default_factory=dict)

    def factor(self, layer: HookedLayer) -> float:
        """Return the factor of the variance from the weights of a layer."""
        return self.factors.get(owner_of(layer.path), 1.0)

    def scaled(self, read: LayerReads) -> LayerReads:
        """Return the reads of a layer, with gradients times the root of its factor."""
        factor = self.factor(read.layer)
        return read if factor == 1.0 else read._replace(g=factor**0.5 * read.g)


class Outputs(NamedTuple):
    """K Gaussians over the outputs, of equal weight.

    Attributes:
        mean: [K, B, C], or [K, B, T, C] for taggers.
        covariance: [K, B, C, C] or [K, B, T, C, C], or in the shape of the mean if outputs are independent.
    """

    mean: Tensor
    covariance: Tensor


@dataclass
class Linearisation:
    """The distribution of a linearised model's parameters, and the link that predicts.

    Attributes:
        gaussian: the distribution.
        link: a name of ``gaussian_links.LINKS``.
    """

    gaussian: Gaussian
    link: str

    def gaussian_at(self, theta: Tensor) -> Gaussian:
        """Return the Gaussian where ``theta`` is, which is kept there."""
        self.gaussian = moved_to(theta, self.gaussian)
        return self.gaussian

    def refuse_shown(self) -> None:
        """Raise if members that the model was not loaded with would be linear around one of several means."""
        num_components = len(self.gaussian.means)
        if num_components > 1:
            raise ValueError(
                f"the posterior is a mixture of {num_components} Gaussians, and a linearised member belongs to the "
                "one it was drawn from, which is unknown for shown members: predict by the members that the model was "
                "loaded with (show(None)), or without linearisation (linearise(None))"
            )


def moved_to(theta: Tensor, gaussian: Gaussian) -> Gaussian:
    """Return the Gaussian on the device and in the dtype of ``theta``; it is moved only if it is elsewhere."""
    means = gaussian.means
    here = (means.device, means.dtype) == (theta.device, theta.dtype)
    return gaussian if here else moved(gaussian, theta)


def linearisation_of(model: BayesianModel, link: str) -> Linearisation:
    """Return the linearisation of ``model`` at its posterior.

    Raises:
        ValueError: for an unknown link, or a posterior that is not Gaussian.
    """
    if link not in LINKS:
        raise ValueError(f"link must be one of {', '.join(LINKS)}, got {link!r}")
    if model.posterior is None or not isinstance(model.posterior.approximation, Gaussian):
        found = "none" if model.posterior is None else f"one of {model.posterior.config.approximation}"
        of_gaussians = names_with(lambda needs: needs.ends_in_gaussian)
        raise ValueError(
            f"linearise needs a Gaussian posterior, got {found}: load one whose method makes a "
            f"Gaussian ({of_gaussians}), or predict by members"
        )
    return Linearisation(model.posterior.approximation, link)


def gaussian_outputs(
    model: BayesianModel, gaussian: Gaussian, inputs: dict[str, Any], directions: Directions | None = None
) -> Outputs:
    """Return the outputs for a batch without labels, one Gaussian for each component of ``gaussian``.

    A tagger takes T times C backward passes, position by position, and has no covariance between positions. Memory is
    bounded: the model reads only so many rows at once as ``RECORD_BUDGET`` allows, in parts of about the same size.

    Args:
        model, gaussian, inputs: the model, the distribution of its parameters, and the batch.
        directions: for outputs [B, C], the directions of which variances are computed, by K backward passes; None means
            J V J', by C backward passes.
    Raises:
        ValueError: for outputs that are neither [B, C] nor [B, T, C].
    """
    hooks = LayerHooks(model.model, model.layout.names)
    head = linear_head(hooks, model.layout)
    components, moved = [], model.members.padded_rows.moved(inputs)
    inputs = moved.inputs
    for mean, covariance in zip(gaussian.means, gaussian.covariances, strict=True):
        mean = mean.to(model.theta)
        single = as_single_model(model.members, mean)
        with torch.inference_mode(False), torch.enable_grad(), single, hooks.open(), skipping_zeros(model.members):
            number = model.num_outputs if directions is None else directions.number
            size = None if head else _part_size(_record_size(hooks, inputs, number), inputs, _record_budget(model))
            parts = [
                _of_batch(model, hooks, head, mean, covariance, part, directions) for part in _rows_of(inputs, size)
            ]
        means, spreads = map(torch.cat, zip(*parts, strict=True))
        components.append([moved.back(means), moved.back(spreads, num_behind=2)])
    return Outputs(*(torch.stack(pieces) for pieces in zip(*components, strict=True)))


def _of_batch(
    model: BayesianModel,
    hooks: LayerHooks,
    head: HookedLayer | None,
    like: Tensor,
    covariance: Covariance,
    inputs: dict[str, Any],
    directions: Directions | None,
) -> tuple[Tensor, Tensor]:
    hooks.begin(inputs)
    logits = model.outputs(inputs)[0]
    if logits.ndim not in (2, 3):
        raise ValueError(
            f"linearised predictions need outputs [B, C] for each example, or [B, T, C] for each token, got "
            f"{list(logits.shape)} from {type(model.core).__name__}: predict by members"
        )

    def spread_of(outputs: Tensor, *, last: bool = True) -> Tensor:
        if not outputs.requires_grad:  # no layer reads a random parameter, as with a disabled adapter
            return like.new_zeros(len(outputs), outputs.shape[1], outputs.shape[1])
        features = None if head is None else _features(hooks, outputs, like)
        if head is not None and features is not None:
            own = head_covariance(covariance, model.layout, features, weight=head.names["weight"])
            return own if directions is None else directions.factor(head) * own
        if directions is None:
            cotangents = torch.eye(outputs.shape[1]).to(outputs)[:, None].expand(-1, *outputs.shape)
            return covariance_of_layers(covariance, model.layout, _reads(hooks, outputs, cotangents, like, last), like)
        return _along(directions, covariance, model.layout, hooks, outputs, like, last)

    # autocast is for the model's own forward: it would give the products of a covariance fewer digits, and two dtypes
    with torch.autocast(logits.device.type, enabled=False):
        if logits.ndim == 2:
            spread = spread_of(logits)
        else:
            positions = logits.unbind(1)
            spread = torch.stack([spread_of(one, last=one is positions[-1]) for one in positions], 1)
    return widened(logits.detach()).to(like.dtype), spread


def _along(
    directions: Directions,
    covariance: Covariance,
    layout: Layout,
    hooks: LayerHooks,
    outputs: Tensor,
    like: Tensor,
    last: bool,
) -> Tensor:
    """Return the covariance [B, C, C] of the outputs from their variances along the chosen directions."""
    chosen = directions.choose(outputs.detach())
    reads = _reads(hooks, outputs, chosen.permute(2, 0, 1).to(outputs), like, last)
    reads = [directions.scaled(read) for read in reads]
    inner = covariance_of_layers(covariance, layout, reads, like)
    if not bool(inner.isfinite().all()):
        raise ValueError(
            f"{_widest(covariance, layout, reads)}: variances of the outputs from its weights are not finite in a "
            "single pass: the model or its posterior has diverged, or the posterior is too wide for float32. Predict "
            "by members, or fit a smaller posterior (a larger prior precision)"
        )
    return spread_along(chosen, inner)


def spread_along(chosen: Tensor, inner: Tensor) -> Tensor:
    """Return U M U' + a (1 - U U') [B, C, C], with the mean variance a of M.

    Args:
        chosen: [B, C, K] orthonormal directions U.
        inner: [B, K, K] M = U' J V J' U.
    """
    chosen, size = chosen.to(inner), chosen.shape[1]
    whole = chosen @ inner @ chosen.mT
    if chosen.shape[2] == size:
        return whole
    others = torch.eye(size).to(inner) - chosen @ chosen.mT
    return whole + inner.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * others


def _widest(covariance: Covariance, layout: Layout, reads: list[LayerReads]) -> str:
    """Return the path of the layer with the largest bound of its part of the variance; NaN counts as infinite."""
    variances = layout.unflatten(covariance.variance.double())

    def bound(read: LayerReads) -> float:
        own = max(float(variances[name].abs().max()) for name in read.layer.names.values())
        size = own * float(read.g.abs().max()) ** 2 * max(float(read.x.abs().max()), 1.0) ** 2
        return size if size == size else float("inf")

    return max(reads, key=bound).layer.path


def owner_of(path: str) -> str:
    """Return the path of the layer that a factor of LoRA belongs to; other layers are their own."""
    return path.partition(".lora_")[0]


def linear_head(hooks: LayerHooks, layout: Layout) -> HookedLayer | None:
    """Return the linear module that owns all random parameters; None if there is no such module."""
    if len(hooks.layers) != 1:
        return None
    (layer,) = hooks.layers
    return layer if layer.weight is not None and not layer.transposed and layer.reader is layer.module else None


def _features(hooks: LayerHooks, logits: Tensor, like: Tensor) -> Tensor | None:
    """Return [B, n] inputs of the linear module whose outputs are the logits; None if the logits differ from them."""
    found: list[LayerRecord] = []
    hooks.on_backward(found.append, first=True)
    weights = torch.arange(1, logits.shape[-1] + 1, dtype=logits.dtype, device=logits.device)
    torch.autograd.backward(logits, weights.expand_as(logits), inputs=[hooks.anchor], retain_graph=True)
    if len(found) != 1:
        return None
    (record,) = found
    read = record.g.ne(0).any(-1)
    if record.g.shape[-1] != len(weights) or not bool((read.sum(1) == 1).all()):
        return None
    return record.x[read].to(like.dtype) if bool((record.g[read] == weights).all()) else None


def _reads(hooks: LayerHooks, logits: Tensor, cotangents: Tensor, like: Tensor, last: bool) -> list[LayerReads]:
    """Return inputs and output gradients of all layers, from a backward pass for each of ``cotangents`` [K, B, C].

    If these are the ``last`` passes, the last one frees the graph. The calls of a layer are in the same order in every
    backward pass, because the graph is the same.
    """
    passes: list[dict[HookedLayer, list[LayerRecord]]] = []
    for index, cotangent in enumerate(cotangents):
        found: dict[HookedLayer, list[LayerRecord]] = {}

        def add(record: LayerRecord, found: dict[HookedLayer, list[LayerRecord]] = found) -> None:
            found.setdefault(record.layer, []).append(over_inputs(record, like.dtype))

        hooks.on_backward(add, first=index == 0)
        more = not last or index + 1 < len(cotangents)
        torch.autograd.backward(logits, cotangent, inputs=[hooks.anchor], retain_graph=more)
        passes.append(found)
    return [
        read_positions(layer, calls[0].x, [call.g for call in calls], calls[0].num_texts)
        for layer in list(passes[0])
        for calls in zip(*(found.pop(layer) for found in passes), strict=True)  # ``read_positions`` has a copy
    ]


def _record_budget(model: BayesianModel) -> int:
    """Return how many elements may be held at once (``RECORD_BUDGET``)."""
    least, most = RECORD_BUDGET.get(model.theta.device.type, OTHER_BUDGET)
    return min(most, max(least, sum(parameter.numel() for parameter in model.model.parameters())))


def _part_size(record_size: int, inputs: dict[str, Any], budget: int) -> int:
    """Return the number of rows of a part, so that all parts of the batch have about as many."""
    rows = shape_of_texts(inputs)[0]
    most = max(1, budget // record_size)
    return -(-rows // -(-rows // most))


def _record_size(hooks: LayerHooks, inputs: dict[str, Any], num_outputs: int) -> int:
    """Return about how many elements the inputs and output gradients of all layers have for one row."""
    total = 0
    for layer in hooks.layers:
        height, width = next(iter(layer.module.parameters(recurse=False))).shape[0], 0
        if layer.linear:
            height, width = cast(Tensor, layer.module.weight).shape[:: -1 if layer.transposed else 1]
        total += (width or height) + num_outputs * height
    rows, texts, positions = shape_of_texts(inputs)
    if not {"input_ids", "inputs_embeds"} & inputs.keys():  # an image has as many elements as its patches, about
        positions = max(tensor.numel() for tensor in tensors_in(inputs).values()) // rows // 256 + 1
    return total * texts * positions


def _rows_of(inputs: dict[str, Any], size: int | None) -> Iterator[dict[str, Any]]:
    """Yield the batch in pieces of ``size`` rows; None yields it whole."""
    # a tensor of inference mode cannot be part of a graph, but its copy can
    yield from pieces(with_tensors(inputs, lambda tensor: tensor.clone() if tensor.is_inference() else tensor), size)
