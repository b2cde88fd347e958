"""Mixture-density regression: p(y | x) = sum_k w_k N(y; m_k, diag(s_k^2)) (Bishop 1994, Mixture density networks).

For labels of D numbers and K components, the K (1 + 2 D) outputs of the head are, in this order,

    K logits of the weights w;   K x D means m;   K x D log standard deviations log s.

The density has no upper bound if a component narrows around one label. A component below ``min_std`` therefore has the
log-likelihood NaN, which stops a run at this step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.uncertainty.custom.base import CustomLikelihood, Moments
from hf_bayes.uncertainty.custom.heteroscedastic import check_min_std, check_sizes, standard_normal


class Components(NamedTuple):
    """The components of mixtures.

    Attributes:
        log_weights: [..., K].
        means, stds: [..., K, D].
    """

    log_weights: Tensor
    means: Tensor
    stds: Tensor


@dataclass(frozen=True)
class MixtureDensity(CustomLikelihood):
    """Numbers with a mixture of normal densities for each input; the head has K (1 + 2 D) outputs.

    Attributes:
        num_components: K.
        num_numbers: D, the number of numbers in a label.
        min_std: the standard deviation below which a component counts as collapsed, in units of the labels.
    """

    name: ClassVar[str] = "mixture_density"
    advice: ClassVar[str] = (
        "A component of the mixture may have collapsed onto a label, with a standard deviation below "
        "MixtureDensity.min_std: standardise the labels, use fewer components (num_components) or a narrower prior "
        "(prior_std), or lower min_std if the labels are that exact"
    )
    num_components: int
    num_numbers: int = 1
    min_std: float = 1e-3

    def __post_init__(self) -> None:
        check_sizes(self.name, num_components=self.num_components, num_numbers=self.num_numbers)
        check_min_std(self.name, self.min_std)

    @property
    def num_outputs(self) -> int:
        return self.num_components * (1 + 2 * self.num_numbers)

    @property
    def label_size(self) -> int:
        return self.num_numbers

    def components(self, outputs: Tensor) -> Components:
        """Return the components of the mixtures of outputs [..., C]."""
        count, size = self.num_components, self.num_numbers
        logits, means, log_stds = outputs.split([count, count * size, count * size], -1)
        shape = (*outputs.shape[:-1], count, size)
        return Components(logits.log_softmax(-1), means.reshape(shape), log_stds.reshape(shape).exp())

    def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
        log_weights, means, stds = self.components(outputs)
        numbers = labels[..., None, None] if self.num_numbers == 1 else labels[..., None, :]
        z = (numbers - means) / stds
        log_densities = (-0.5 * z.square() - stds.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
        collapsed = (stds < self.min_std).flatten(-2).any(-1)
        return (log_weights + log_densities).logsumexp(-1).masked_fill(collapsed, math.nan)

    def predict(self, outputs: Tensor) -> Moments:
        log_weights, means, stds = self.components(outputs)
        weights = log_weights.exp()[..., None]
        mean = (weights * means).sum(-2)
        variance = (weights * (stds.square() + (means - mean[..., None, :]).square())).sum(-2)
        return Moments(mean, variance)

    def max_log_prob(self) -> float:
        return self.num_numbers * (-math.log(self.min_std) - 0.5 * math.log(2 * math.pi))

    def draw(self, outputs: Tensor, uniforms: Tensor) -> Tensor:
        log_weights, means, stds = self.components(outputs)
        numbers = uniforms.double().reshape(len(outputs), self.num_numbers)
        upper = log_weights.double().exp().cumsum(-1)
        upper = upper / upper[:, -1:]
        component = torch.searchsorted(upper, numbers[:, :1].contiguous(), right=True).clamp_max(
            self.num_components - 1
        )
        lower = torch.nn.functional.pad(upper, (1, -1))
        # given the component, the uniform is uniform between its two bounds, so it serves a second time
        low, high = lower.gather(1, component), upper.gather(1, component)
        first = ((numbers[:, :1] - low) / (high - low)).clamp(0, 1)
        noise = standard_normal(torch.cat([first, numbers[:, 1:]], 1)).to(means.dtype)
        index = component[..., None].expand(-1, 1, self.num_numbers)
        return (means.gather(1, index)[:, 0] + stds.gather(1, index)[:, 0] * noise).view(uniforms.shape)
