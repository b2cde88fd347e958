"""All covariances, between units, tokens and layers: tensors are mean + sum_j root_j e_j with shared e_j ~ N(0, 1).

Every operation of torch is linearised by forward-mode differentiation, for all columns of the root at once. Sums of
correlated tensors (a branch and its skip connection) are exact, because both refer to the same noise. Each layer with
random weights adds noise of its own, once in a pass. The number of columns grows with units times tokens, so this
structure is for small models. It is the reference by which ``diagonal`` is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_bayes.models.single_pass import attention
from hf_bayes.models.single_pass.gaussian_tensor import for_each_tensor, gaussian_tensors_in, mean_of, replaced
from hf_bayes.models.single_pass.linear import root_of
from hf_bayes.models.single_pass.operations import SOFTMAX

MOST_NOISES = 4096
"""The largest number of outputs of a layer: with n of them, a row takes n^2 numbers and n^3 operations."""


class NoiseSources:
    """The independent noises e_j that one forward pass has added so far.

    Args:
        num_rows: returns B, the rows of the batch in the pass; None leaves the rows of inputs unchecked.
    Attributes:
        count: the number of noises.
        paths: the random modules that have added them.
    """

    def __init__(self, num_rows: Callable[[], int] | None = None) -> None:
        self.num_rows = num_rows
        self.count = 0
        self.paths: set[str] = set()

    def add_module(self, path: str, rows: int) -> None:
        """Note that a random module adds its noise, for an input with so many rows.

        Raises:
            ValueError: for a module that has added its noise before. Its weights are the same in both calls, and new
                noise would count as independent of the first. Also for rows that are not the rows of the batch, or one
                row for all of them: outputs in different rows count as independent of each other.
        """
        remedy = "Choose structure='low_rank', leave the module out of the subspace, or predict by members"
        if path in self.paths:
            raise ValueError(
                f"{path}: structure='full' supports one call of each random module in a forward pass, and the model "
                f"calls this one again (as ALBERT and DeBERTa-v2 do). {remedy}"
            )
        if self.num_rows is not None and rows not in (expected := self.num_rows(), 1):
            raise ValueError(
                f"{path}: structure='full' takes the rows of a layer's input for the rows of the batch, got {rows} "
                f"rows, expected {expected}: the model puts positions first (as XLNet does), or flattens tokens or "
                f"windows into rows. {remedy}"
            )
        self.paths.add(path)


@dataclass(frozen=True, eq=False)
class Factors:
    """The columns of a root of the covariance.

    Attributes:
        roots: [r, *shape of the mean], the columns of the first r noises; the columns of later noises are 0.
        sources: the noises of the pass.
        deterministic_scores: True to take queries and keys at their means, as the paper does (eq. 59).
    """

    roots: Tensor
    sources: NoiseSources
    deterministic_scores: bool = False

    @property
    def variance(self) -> Tensor:
        """The variances, in the shape of the mean."""
        return self.roots.square().sum(0)

    def covariance(self) -> Tensor:
        """Return [..., C, C]."""
        return torch.einsum("r...k,r...l->...kl", self.roots, self.roots)

    def after(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        """Return the spread of the result; see ``Spread``."""
        if function is Tensor.detach:  # its derivative is 0, and its value has all the noise
            return self
        if self.deterministic_scores and function in SOFTMAX and result.ndim == 4:  # the scores of eager attention
            return None
        if function in (Tensor.__iadd__, Tensor.add_):
            function = torch.add
        run: Callable[..., Any] = function
        if function is F.scaled_dot_product_attention:
            run = self._attention
        random = list(gaussian_tensors_in((args, kwargs)))
        count = max(len(x.spread.roots) for x in random)
        found = pushed(run, args, kwargs, [self._padded(x.spread.roots, count) for x in random])
        return for_each_tensor(found, self.new)

    def new(self, roots: Tensor) -> Factors:
        """Return a spread with the same settings."""
        return Factors(roots, self.sources, self.deterministic_scores)

    def _padded(self, roots: Tensor, count: int) -> Tensor:
        return torch.cat([roots, roots.new_zeros(count - len(roots), *roots.shape[1:])])

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **options: Any) -> Tensor:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(repeats, -3) if repeats > 1 else x for x in (key, value))
        scale = options.get("scale") or query.shape[-1] ** -0.5
        if self.deterministic_scores:
            query, key = _without_tangent(query), _without_tangent(key)
        weights = attention.weights_of(query, key, attn_mask, scale, causal=bool(options.get("is_causal")))
        return weights @ value


def added_noise(joint: Tensor, shape: torch.Size, transported: Factors | None, like: Factors) -> Factors:
    """Return the spread of a linear layer's output: the transported noise of its input, and new noise.

    Args:
        joint: [B, n, n] covariance of the new noise, n = T * out.
        shape: [B, T, out] or [B, out], of the output.
        transported: the noise of the input behind the mean of the weight; None for a deterministic input.
        like: a spread with the settings and the noises of the pass.
    """
    columns = root_of(joint).permute(2, 0, 1).reshape(-1, *shape)
    sources = like.sources
    before = columns.new_zeros(sources.count, *shape)
    if transported is not None:
        before[: len(transported.roots)] = transported.roots
    sources.count += len(columns)
    return like.new(torch.cat([before, columns]))


def linear_factors(layer: Any, x: Tensor, noise: Factors | None, settings: Factors) -> Factors:
    """Return the spread of a random linear layer's output; arguments as of ``drawn.linear_tangents``."""
    settings.sources.add_module(layer.path, len(x))
    inputs, transported = _transported(x, noise, layer.law.mean, settings)
    shape = torch.Size((*x.shape[:-1], len(layer.law.mean)))
    _refuse_large(inputs.shape[2], shape[-1])
    return added_noise(layer.factor * layer.law.joint(inputs), shape, transported, settings)


def lora_factors(layer: Any, x: Tensor, noise: Factors | None, settings: Factors) -> Factors:
    """Return the spread of a random LoRA layer's output; ``layer`` is an ``installed.RandomLora``."""
    settings.sources.add_module(layer.path, len(x))
    inputs, transported = _transported(x.to(layer.low.mean.dtype), noise, layer.whole, settings)
    rows, length, rank = inputs.shape[1], inputs.shape[2], len(layer.low.mean)
    _refuse_large(length, len(layer.high.mean))
    low_joint = layer.low.joint(inputs)  # [B, T r, T r]
    four = low_joint.view(rows, length, rank, length, rank)
    b = layer.high.mean
    through = torch.einsum("kr,btrsq,lq->btksl", b, four, b).reshape(rows, length * len(b), -1)
    values, vectors = torch.linalg.eigh(low_joint)
    fresh = (vectors * values.clamp_min(0).sqrt()[:, None]).permute(2, 0, 1).reshape(-1, rows, length, rank)
    low = torch.cat([F.linear(inputs, layer.low.mean), fresh])
    joint = layer.factor * layer.scaling**2 * (through + layer.high.joint(low))
    if layer.base is not None:  # the layer below the adapter is random, too
        joint = joint + layer.base.factor * layer.base.law.joint(inputs)
    shape = torch.Size((*x.shape[:-1], len(b)))
    return added_noise(joint, shape, transported, settings)


def _refuse_large(length: int, size: int) -> None:
    """Refuse a layer with so many outputs that the roots of their joint covariance would take minutes."""
    if length * size > MOST_NOISES:
        raise ValueError(
            f"structure='full' keeps the covariance between all outputs of a layer, {length} tokens x {size} units = "
            f"{length * size} here, and takes at most {MOST_NOISES}: it is for small models and short texts. Choose "
            "structure='low_rank' or 'diagonal'"
        )


def _transported(x: Tensor, noise: Factors | None, weight: Tensor, settings: Factors) -> tuple[Tensor, Factors | None]:
    """Return the input's mean and columns [q, B, T, in] for ``WeightLaw.joint``, and its noise behind the weight."""
    roots = x.new_zeros(0, *x.shape) if noise is None else noise.roots.to(x)
    inputs = torch.cat([x[None], roots])
    inputs = inputs[:, :, None] if x.ndim == 2 else inputs
    return inputs, None if noise is None else settings.new(F.linear(roots, weight))


def pushed(
    function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], roots: list[Tensor] | None = None
) -> Any:
    """Return the columns of ``function(*args, **kwargs)``, by forward-mode differentiation for all columns at once.

    Args:
        function: any differentiable function of torch.
        args, kwargs: its arguments, some of them Gaussian tensors.
        roots: the columns [r, *shape] of the Gaussian tensors, in order; None takes their own.
    """
    random = list(gaussian_tensors_in((args, kwargs)))
    roots = [x.spread.roots for x in random] if roots is None else roots

    def changed(*values: Tensor) -> Any:
        places = iter(values)
        own_args, own_kwargs = replaced((args, kwargs), lambda _: next(places))
        return function(*own_args, **own_kwargs)

    # clones are no tensors of inference mode, which differentiation refuses
    with torch.inference_mode(False), torch.no_grad():
        means = tuple(mean_of(x).detach().clone() for x in random)
        columns = [root.to(mean.dtype).clone() for root, mean in zip(roots, means, strict=True)]
        return torch.vmap(lambda *tangents: torch.func.jvp(changed, means, tangents)[1])(*columns)


def _without_tangent(x: Tensor) -> Tensor:
    return x.detach()
