"""Modules with random weights in the structure of low rank: the tangents along draws of their weights.

With the draw (dW, dA, dB), the columns dx of the input, and x at the draw (``outer.at_draws``),

    linear layer:  dy = W dx + dW x + db,
    LoRA:          dy = (W + c B A) dx + c (B dA x + dB (A + dA) x),
    other modules: forward-mode differentiation of the module's own forward.

The products dW dx and dB dA are of second order, but without them the variance of a wide posterior is too small.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_bayes.core import compat
from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import Covariance, LowRank
from hf_bayes.members.stacked_module import Stacked
from hf_bayes.models.single_pass.later import Choose, Later
from hf_bayes.models.single_pass.outer import Outer, at_draws
from hf_bayes.models.single_pass.second_order import with_drift
from hf_bayes.models.single_pass.sources import LinearSource
from hf_bayes.models.single_pass.tangents import Tangents

RANK = 16
"""The default number of columns. A pass costs at least as much as so many members."""

LEADING = 8
"""The default number of columns if the posterior has as many leading columns, which are no draws and have no noise.

Four columns of SWAG leave out so much of a classifier's noise that inputs are ranked worse
(docs/results/single_pass.md)."""

LEADING_OF_WORDS = 4
"""The same for language models, which four columns of SWAG rank as well as more columns do, at less cost."""

SEED = 0
"""The seed of the draws. They are the same in all passes, so that caches and repeated predictions agree."""


def leading_columns(covariance: Covariance, rank: int) -> tuple[Tensor, Covariance]:
    """Return columns c_j [n, d] that the covariance is known to have, and the covariance without sum_j c_j c_j'.

    A low-rank covariance that is wider along a few directions, as of SWAG, has at most ``rank`` such columns, the
    widest ones. Other covariances have none.
    """
    if not isinstance(covariance, LowRank):
        return torch.zeros(0, covariance.dim).to(covariance.variance), covariance
    chosen = covariance.scale.argsort(descending=True)[: min(_num_wide(covariance), rank)]
    columns = covariance.std * (covariance.basis[:, chosen] * (covariance.scale[chosen] - 1).sqrt()).mT
    scale = covariance.scale.clone()
    scale[chosen] = 1.0
    return columns, LowRank(covariance.std, covariance.basis, scale)


def draws_of(covariance: Covariance, layout: Layout, rank: int) -> dict[str, Tensor]:
    """Return {name: [S, *shape]}, S = ``rank``, by parameter: the sum of their products estimates the covariance.

    The first n are the leading columns. The others are draws of what remains, over sqrt(S - n). If n = S there are no
    draws, and the variance of what remains is left out: its noise would disturb the order of inputs more.
    """
    columns, remainder = leading_columns(covariance, rank)
    count = rank - len(columns)
    noise = torch.randn(count, layout.dim, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    return layout.unflatten(torch.cat([columns, remainder.root(noise.to(columns)) / max(count, 1) ** 0.5]))


def rank_for(covariance: Covariance, leading: int = LEADING) -> int:
    """Return the default number of columns, ``leading`` if the covariance has so many leading columns."""
    wide = isinstance(covariance, LowRank) and _num_wide(covariance) >= leading
    return leading if wide else RANK


def _num_wide(covariance: LowRank) -> int:
    return int((covariance.scale > 1).sum())


def linear_tangents(item: Any, x: Tensor, noise: Tangents | None, settings: Tangents) -> Tangents:
    """Return the spread of a random linear layer's output.

    Args:
        item: an ``installed.RandomLinear``.
        x: [..., in] the mean of the input.
        noise: the spread of the input; None if it has none.
        settings: a spread with the settings of the pass.
    """
    own = LinearSource(item.law.mean, None, x, item.law, item.factor)
    before = None if noise is None else Later(lambda choose: noise.at(choose).moved)
    # if all columns are leading columns there is no draw of what remains, and its exact noise is the better choice
    drawn = item.law.correlated and any(part is not None and len(part) > item.shared for part in item.draws)
    return settings.new(before, Outer(item.law.mean, own, item.draws, shared=item.shared, drawn=drawn))


def lora_tangents(item: Any, x: Tensor, noise: Tangents | None, settings: Tangents) -> Tangents:
    """Return the spread of a random LoRA layer's output; ``item`` is an ``installed.RandomLora``.

    peft keeps the adapter of a half-precision model in float32 and gives outputs of the model's dtype, as here.
    """

    def columns(choose: Choose) -> Tensor:
        return _lora_columns(item, choose(x), None if noise is None else noise.at(choose).moved).to(x.dtype)

    return settings.new(Later(columns))


def _lora_columns(item: Any, x: Tensor, noise: Tensor | None) -> Tensor:
    """Return [S + 1, ..., out]: (W + c B A) dx, and [dA x, (A + dA) x] [c B, c dB]' by one product for each draw."""
    a, b = item.own["lora_A"], item.own["lora_B"]
    lead, x = x.shape[:-1], x.to(a.dtype).flatten(0, -2)
    size = item.scaling * item.factor**0.5  # the factor is of the whole noise, the product dB dA among it
    noise = None if noise is None else noise.flatten(1, -2)
    inputs = x[None] if noise is None else at_draws(x + noise[-1].to(a.dtype), noise[:-1].to(a.dtype), item.shared)
    low = inputs @ a.mT
    left: list[Tensor] = []
    right: list[Tensor] = []
    if "lora_A" in item.draws:
        draws = item.draws["lora_A"]
        left.append(inputs @ draws.mT)
        right.append((size * b.mT).expand(len(draws), -1, -1))
        low = at_draws(low, left[0], item.shared)
    if "lora_B" in item.draws:
        draws = item.draws["lora_B"]
        left.append(low.expand(len(draws), -1, -1))
        right.append(size * draws.mT)
    found = torch.bmm(torch.cat(left, -1), torch.cat(right, -2))
    if noise is None:
        return with_drift(found).unflatten(1, lead)  # type: ignore[no-any-return]
    before = F.linear(noise, item.whole.to(noise.dtype))
    before[:-1] += found.to(before.dtype)
    return before.unflatten(1, lead)  # type: ignore[no-any-return]


class RandomModule:
    """A norm or an embedding whose weights are random; arguments as of ``installed.RandomLinear``."""

    def __init__(self, item: Stacked, values: dict[str, Tensor], factor: float, draws: dict[str, Tensor]) -> None:
        self.module, self.factor = item.module, factor
        self.path = next(iter(item.names.values())).rpartition(".")[0]
        self.own = {key: values[name].to(item.parameter(key)) for key, name in item.names.items()}
        self.draws = {key: draws[name].to(self.own[key]) for key, name in item.names.items()}

    def mean(self, x: Tensor) -> Tensor:
        """Return the output of the module at the mean of its weights."""
        return compat.forward_with(self.module, self.own, x)

    def spread(self, x: Tensor, noise: Tangents | None, settings: Tangents) -> Tangents:
        """Return the spread of the output for an input with mean ``x`` and spread ``noise``."""
        names = list(self.own)

        def run(values: tuple[Tensor, ...], inputs: Tensor) -> Tensor:
            return compat.forward_with(self.module, dict(zip(names, values, strict=True)), inputs)

        with torch.inference_mode(False), torch.no_grad():
            x = x.clone()
            weights = tuple(self.own[name].clone() for name in names)
            moved = tuple(with_drift(self.factor**0.5 * self.draws[name]) for name in names)
            if noise is None:
                found = torch.vmap(lambda d: torch.func.jvp(lambda w: run(w, x), (weights,), (d,))[1])(moved)
            else:
                roots = noise.moved.to(x.dtype).clone()
                found = torch.vmap(lambda d, r: torch.func.jvp(run, (weights, x), (d, r))[1])(moved, roots)
        return settings.new(found)
