"""The arithmetic of ``decomposition`` on one block of rows: mixtures, entropies and KL divergences in base 2."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


class RowSums(NamedTuple):
    """The sums over classes that a row's entropies are computed from, in float64. The names are as in ``MemberBlock``.

    Attributes:
        norm: [M, n] the members' norms.
        log_scale: [1, n] the mixture's log2 scale.
        mass: [1, n] the sum of mean.
        log_mean: [1, n] the sum of mean log2(mean).
        divergence: [M, n] the sum of probs log2(probs norm / mean); NaN where a logit is -inf.
    """

    norm: Tensor
    log_scale: Tensor
    mass: Tensor
    log_mean: Tensor
    divergence: Tensor

    @classmethod
    def of(cls, blocks: list[Tensor], dtype: torch.dtype) -> RowSums:
        """Join the sums of all blocks (``MemberBlock.sums``).

        What follows runs once for all rows, because it takes no longer for all rows than for a few.
        """
        numbers = (torch.cat(blocks, -1) if len(blocks) > 1 else blocks[0]).to(dtype)
        num_members = len(numbers) // 2 - 1
        return cls(*torch.split(numbers, [num_members, 1, 1, 1, num_members]))

    def total(self) -> Tensor:
        """Return the [n] entropies of the mixture in nats."""
        return entropy(self.mass, self.log_mean)[0]

    def epistemic(self) -> Tensor:
        """Return the [n] values of mean_m KL(p_m || mixture) in nats."""
        # A member's log2 p is log2(probs norm) - log2(norm). As sum_c p = 1, the mean of log2(norm) can be subtracted
        # once for all members.
        return ((self.divergence.sum(0) / self.mass - (self.norm.log2().mean(0) - self.log_scale)) * LN2)[0]


class MemberBlock:
    """The members' distributions on a block of rows. Logarithms have base 2.

    The mixture is multiplied by a power of two near the members' norms, ``2 ** log_scale``. The multiplication is
    exact, and it brings the summed logarithms near 0. A float32 sum near 10 would have an error of 1e-6.

    Attributes:
        exponents: [M, c, C] log2 of probs times norm, at most 0; ``sums`` overwrites them.
        probs: [M, c, C] each member's contribution to ``mean``.
        peak, norm: [M, c, 1] the largest logit, and the sum of exp(logit - peak).
        log_scale: [c, 1] integers.
        mean: [c, C] the scaled mixture.
        log_mean: [c, C] log2 of ``mean``, bounded below so that 0 log 0 is 0.
    """

    def __init__(self, block: Tensor, exponents: Tensor, probs: Tensor) -> None:
        self.block, self.exponents, self.probs = block, exponents, probs
        wide = block if block.dtype == exponents.dtype else exponents.copy_(block)
        self.peak = wide.amax(-1, keepdim=True)
        # Subtract before scaling: scaling logits of size 1e4 first would lose three digits.
        torch.exp2(torch.sub(wide, self.peak, out=exponents).mul_(_LOG2E), out=probs)
        self.norm = probs.sum(-1, keepdim=True)
        self.log_scale = self.norm.log2().mean(0).round_()
        self.mean = probs.mul_(self.log_scale.exp2() / (len(block) * self.norm)).sum(0)
        self.log_mean = self.mean.log2().clamp_(min=log2_floor(probs.dtype))

    def log_mixture(self, result: Tensor) -> None:
        """Write the natural log of the mixture into ``result`` [c, C]."""
        torch.sub(self.log_mean, self.log_scale, out=result).mul_(LN2)
        # mean and log_mean do not distinguish a masked class from a class that underflowed. These entries are computed
        # again from the logits.
        precise = torch.finfo(result.dtype).tiny / torch.finfo(result.dtype).eps
        if self.mean.numel() and bool(self.mean.amin() < precise):
            row, column = (self.mean < precise).nonzero(as_tuple=True)
            log_probs = self.block[:, row, column].to(result.dtype) - self.peak[:, row, 0] - self.norm[:, row, 0].log()
            result[row, column] = log_probs.logsumexp(0) - math.log(len(self.block))

    def mixture(self) -> Tensor:
        """Return the [c, C] probabilities of the mixture."""
        return self.mean * (-self.log_scale).exp2()

    def sums(self) -> Tensor:
        """Return [2M + 3, c]: the fields of ``RowSums`` one after another. Call it last: it works in place."""
        mass, log_mean = self.mean.sum(-1), (self.mean * self.log_mean).sum(-1)
        divergence = self.exponents.sub_(self.log_mean).mul_(self.probs).sum(-1)
        return torch.cat([self.norm[..., 0], self.log_scale.T, mass[None], log_mean[None], divergence])


def entropy(mass: Tensor, log_mean: Tensor) -> Tensor:
    """Return the entropy of mean / mass in nats, from the sums of mean and of mean log2(mean)."""
    return (mass.log2() - log_mean / mass) * LN2


def small_epistemic(block: Tensor, work: Tensor, spare: Tensor) -> Tensor:
    """Return mean_m KL(p_m || mixture) in nats, [M, c, C] -> [c], from differences of probabilities.

    With q the mixture and r = p_m / q - 1, the divergence is sum_c q mean_m [(1 + r) log(1 + r) - r]. No term is
    negative and each term is of second order, so the error is about eps * sqrt(epistemic) instead of eps. Differences
    are taken to member 0, never to a rounded mean. Members with equal logits give exactly 0.
    """
    limits = torch.finfo(work.dtype)
    work.copy_(block)
    work.sub_(work.amax(-1, keepdim=True)).mul_(_LOG2E).exp2_()
    probs = work.div_(work.sum(-1, keepdim=True))
    first = probs[0].clone()
    difference = probs.sub_(first)
    mean_difference = difference.mean(0)
    mean = first.add_(mean_difference)
    ratio = difference.sub_(mean_difference).div_(mean.clamp_min(limits.tiny)).clamp_(min=limits.eps - 1)
    log_ratio = torch.log1p(ratio, out=spare)
    divergence = log_ratio.addcmul_(ratio, log_ratio).sub_(ratio)
    result = divergence.mean(0).mul_(mean).sum(-1).clamp_(min=0)
    # The last bit of exp2 depends on the position in memory, so equal logits can give 1e-14. In such rows the result is
    # 0 if the logits are equal.
    noise = result < 64 * limits.eps**2
    if bool(noise.any()):
        result.masked_fill_(noise & (block == block[:1]).all(-1).all(0), 0)
    return result


def log2_floor(dtype: torch.dtype) -> float:
    """Return a base-2 logarithm x such that ``2 ** x`` is 0 in ``dtype``, while x and sums of it are finite."""
    return 2 * math.log2(torch.finfo(dtype).tiny)
