"""Total, aleatoric and epistemic uncertainty of M members' predictions (posteriors paper, eq. 2), in nats.

With p_m the categorical distribution of member m and q = mean_m p_m their mixture,

    total = H[q],   aleatoric = mean_m H[p_m],   epistemic = total - aleatoric = mean_m KL(p_m || q) in [0, log M].

The computation follows three rules:

* Rows are processed in blocks of a few MB, so no temporary tensor is as large as the logits. bfloat16 and float16 are
  widened to float32 inside a block; float64 stays float64. There are no matrix products, because TF32 or autocast would
  round them.
* There is one exponential per logit, and it is a power of two: ``exp2`` is as accurate as ``exp`` and, on CPU, up to
  four times as fast.
* Epistemic uncertainty is computed as the mean KL divergence. The difference of two entropies near 10 nats would have a
  rounding error of 1e-6. Where the KL sum is too coarse as well, ``_small_epistemic`` computes the rows again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.uncertainty.row_blocks import RowBlocks

_LOG2E = math.log2(math.e)
_LN2 = math.log(2.0)


class Uncertainty(NamedTuple):
    """The three uncertainties in nats, [...] each. ``total == aleatoric + epistemic`` holds exactly."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


class Prediction(NamedTuple):
    """The joint prediction of M members.

    Attributes:
        log_probs: [..., C] log of the mixture mean_m p_m; float32 (float64 for float64 logits).
        uncertainty: the uncertainties of the mixture, [...] each.
    """

    log_probs: Tensor
    uncertainty: Uncertainty


class Partial(NamedTuple):
    """Partial sums over some of the members.

    Partial sums of disjoint sets of members can be added, also across processes (one SUM per field).

    Attributes:
        num_members: [] int64, the number of members in the sums.
        probs: [..., C] sum of the members' probabilities, float32 (float64 for float64 logits).
        entropies: [...] sum of the members' entropies in nats, float64 where the device has it.
    """

    num_members: Tensor
    probs: Tensor
    entropies: Tensor


@torch.no_grad()
def mixture(logits: Tensor) -> Tensor:
    """Return log mean_m softmax(logits_m). Probabilities are averaged, never logits.

    Args:
        logits: [M, ..., C] logits or log-probabilities of M members; -inf masks a class.
    Returns:
        [..., C] log-probabilities. They are accurate even where all probabilities underflow.
    Raises:
        ValueError: if a row holds NaN or +inf, or only -inf.
    """
    blocks = RowBlocks(logits)
    log_probs = blocks.empty(blocks.num_classes)
    for rows, members in _members(blocks):
        members.log_mixture(log_probs[rows])
    _refuse_undefined(log_probs[:, 0].isnan(), logits)
    return log_probs.view(logits.shape[1:])


@torch.no_grad()
def decompose(logits: Tensor, *, mask: Tensor | None = None) -> Uncertainty:
    """Split predictive entropy into aleatoric and epistemic parts (posteriors paper, eq. 2).

    total = H[mean_m p_m],  aleatoric = mean_m H[p_m],  epistemic = total - aleatoric >= 0.

    Args:
        logits: [M, ..., C] logits or log-probabilities of M members; -inf masks a class.
        mask: [...] bool; False marks rows to skip (padding). These rows may hold anything, and their results are NaN.
    Returns:
        Three [...] tensors in nats, float32 (float64 for float64 logits). Epistemic is the mutual information
        between label and weights. It is exactly 0 for one member or for equal members.
    Raises:
        ValueError: if a row holds NaN or +inf, or only -inf.
    """
    _check_mask(mask, logits)
    blocks = RowBlocks(logits)
    return _uncertainty([members.sums() for _, members in _members(blocks, mask)], blocks, mask)


@torch.no_grad()
def predict(logits: Tensor) -> Prediction:
    """Return the mixture and its uncertainties from one pass over [M, ..., C] logits.

    The results equal ``mixture`` and ``decompose``, and the same errors are raised.
    """
    blocks = RowBlocks(logits)
    log_probs, sums = blocks.empty(blocks.num_classes), []
    for rows, members in _members(blocks):
        members.log_mixture(log_probs[rows])
        sums.append(members.sums())
    return Prediction(log_probs.view(logits.shape[1:]), _uncertainty(sums, blocks))


@torch.no_grad()
def partial(logits: Tensor) -> Partial:
    """Return the partial sums of m of the members: ``finish(merge(partial(a), partial(b)))`` predicts with all members.

    This serves when the logits of all members do not fit in memory at once. Sums are less accurate than ``predict``:
    epistemic uncertainty has an absolute error of about 1e-6 in float32. The probability of a class that is not masked
    is never below the smallest float, so its log-probability stays finite.

    Args:
        logits: [m, ..., C] as in ``mixture``.
    Raises:
        ValueError: if a row holds NaN or +inf, or only -inf.
    """
    blocks = RowBlocks(logits)
    probs, sums = blocks.empty(blocks.num_classes), []
    smallest = torch.finfo(probs.dtype).smallest_normal
    for rows, members in _members(blocks):
        possible = members.block.amax(0) > -math.inf
        probs[rows] = torch.where(possible, members.mixture().clamp_min(smallest), 0.0)
        sums.append(members.sums())
    total, epistemic = _entropies(sums, blocks)
    entropies = total - epistemic
    num_members = len(logits)
    return Partial(
        torch.tensor(num_members, device=logits.device),
        probs.mul_(num_members).view(logits.shape[1:]),
        entropies.mul_(num_members).view(logits.shape[1:-1]),
    )


@torch.no_grad()
def merge(a: Partial, b: Partial) -> Partial:
    """Return the sums over the members of both partial sums.

    Raises:
        ValueError: if ``a`` and ``b`` have different rows or classes.
    """
    if a.probs.shape != b.probs.shape:
        raise ValueError(
            f"merge needs partials of the same rows and classes, got {list(a.probs.shape)} and {list(b.probs.shape)}"
        )
    return Partial(a.num_members + b.num_members, a.probs + b.probs, a.entropies + b.entropies)


@torch.no_grad()
def finish(sums: Partial) -> Prediction:
    """Return the prediction of all members that were summed; see ``partial`` for its accuracy."""
    shape, num_members = sums.probs.shape, sums.num_members
    blocks = RowBlocks(sums.probs[None])
    log_probs, total = blocks.empty(blocks.num_classes), blocks.empty()
    for rows, block in blocks.rows():
        log_scale = (block[0].amax(-1, keepdim=True) / num_members).log2().round_()  # see _Members
        mean = block[0] * ((-log_scale).exp2() / num_members)
        log_mean = mean.log2()
        log_probs[rows] = (log_mean + log_scale).mul_(_LN2)
        cross = mean * log_mean.clamp_(min=_floor(mean.dtype))
        total[rows] = _entropy(mean.sum(-1).to(total.dtype), cross.sum(-1).to(total.dtype))
    total = total.view(shape[:-1])
    epistemic = (total - sums.entropies / num_members).clamp(min=0).minimum(num_members.to(total.dtype).log())
    return Prediction(log_probs.view(shape), _identity(total, epistemic, blocks.dtype))


def _members(blocks: RowBlocks, mask: Tensor | None = None) -> Iterator[tuple[slice | Tensor, _Members]]:
    """Yield the indices of a block's rows among the N rows, and the members' distributions on these rows.

    The distributions are valid until the next block.
    """
    for rows, block in blocks.rows(mask):
        yield rows, _Members(block, *blocks.buffers(block))


class _Sums(NamedTuple):
    """The sums over classes that a row's entropies are computed from, in float64. The names are as in ``_Members``.

    Attributes:
        norm: [M, n] the members' norms.
        log_scale: [1, n] the mixture's log2 scale.
        mass: [1, n] the sum of mean.
        log_mean: [1, n] the sum of mean log2(mean).
        divergence: [M, n] the sum of probs log2(probs norm / mean); NaN where a logit is -inf (see ``_entropies``).
    """

    norm: Tensor
    log_scale: Tensor
    mass: Tensor
    log_mean: Tensor
    divergence: Tensor

    @classmethod
    def of(cls, blocks: list[Tensor], dtype: torch.dtype) -> _Sums:
        """Join the sums of all blocks (``_Members.sums``).

        What follows runs once for all rows, because it takes no longer for all rows than for a few.
        """
        numbers = (torch.cat(blocks, -1) if len(blocks) > 1 else blocks[0]).to(dtype)
        num_members = len(numbers) // 2 - 1
        return cls(*torch.split(numbers, [num_members, 1, 1, 1, num_members]))

    def total(self) -> Tensor:
        """Return the [n] entropies of the mixture in nats."""
        return _entropy(self.mass, self.log_mean)[0]

    def epistemic(self) -> Tensor:
        """Return the [n] values of mean_m KL(p_m || mixture) in nats."""
        # A member's log2 p is log2(probs norm) - log2(norm). As sum_c p = 1, the mean of log2(norm) can be subtracted
        # once for all members.
        return ((self.divergence.sum(0) / self.mass - (self.norm.log2().mean(0) - self.log_scale)) * _LN2)[0]


class _Members:
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
        self.log_mean = self.mean.log2().clamp_(min=_floor(probs.dtype))

    def log_mixture(self, result: Tensor) -> None:
        """Write the natural log of the mixture into ``result`` [c, C]."""
        torch.sub(self.log_mean, self.log_scale, out=result).mul_(_LN2)
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
        """Return [2M + 3, c]: the fields of ``_Sums`` one after the other. Call it last, because it works in place."""
        mass, log_mean = self.mean.sum(-1), (self.mean * self.log_mean).sum(-1)
        divergence = self.exponents.sub_(self.log_mean).mul_(self.probs).sum(-1)
        return torch.cat([self.norm[..., 0], self.log_scale.T, mass[None], log_mean[None], divergence])


def _entropy(mass: Tensor, log_mean: Tensor) -> Tensor:
    """Return the entropy of mean / mass in nats, from the sums of mean and of mean log2(mean)."""
    return (mass.log2() - log_mean / mass) * _LN2


def _small_epistemic(block: Tensor, work: Tensor, spare: Tensor) -> Tensor:
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


def _uncertainty(sums: list[Tensor], blocks: RowBlocks, mask: Tensor | None = None) -> Uncertainty:
    """Return the [...] uncertainties from the sums of all blocks; they are NaN outside the mask."""
    total, epistemic = _entropies(sums, blocks, mask)
    return Uncertainty(*(part.view(blocks.logits.shape[1:-1]) for part in _identity(total, epistemic, blocks.dtype)))


def _entropies(sums: list[Tensor], blocks: RowBlocks, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the [N] total and epistemic uncertainties in nats; they are NaN outside the mask.

    Rows where the KL sum is not accurate enough are computed again. Rows without a prediction raise an error.
    """
    if not sums:
        return blocks.empty().fill_(math.nan), blocks.empty().fill_(math.nan)
    numbers = _Sums.of(sums, blocks.sum_dtype)
    total, epistemic = numbers.total(), numbers.epistemic()
    if mask is not None:
        mask = mask.reshape(-1)
        total, epistemic = (blocks.empty().fill_(math.nan).masked_scatter_(mask, part) for part in (total, epistemic))
    # The KL sum has an error of about eps: below 1000 eps it has fewer than three digits. It is NaN in rows with masked
    # classes. Such rows are rare, so bounding the logarithms of all rows would cost more than computing these again.
    again = ~(epistemic >= 1024 * torch.finfo(blocks.dtype).eps)
    if mask is not None:
        again &= mask
    num_members = len(blocks.logits)
    if bool(again.any()):
        _refuse_undefined(total.isnan() & again, blocks.logits)
        for rows, block in blocks.rows(again) if num_members > 1 else ():
            epistemic[rows] = _small_epistemic(block, *blocks.buffers(block)).to(epistemic.dtype)
    # for one member epistemic uncertainty is 0: total - total is also NaN outside the mask
    return total, total - total if num_members == 1 else epistemic.clamp(min=0, max=math.log(num_members))


def _identity(total: Tensor, epistemic: Tensor, dtype: torch.dtype) -> Uncertainty:
    """Return the three uncertainties in ``dtype``.

    The total is computed last, as a sum: rounding each one separately would break the identity.
    """
    aleatoric = (total - epistemic).clamp_(min=0).to(dtype)
    epistemic = epistemic.to(dtype)
    return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)


def _floor(dtype: torch.dtype) -> float:
    """Return a base-2 logarithm x such that ``2 ** x`` is 0 in ``dtype``, while x and sums of it are finite."""
    return 2 * math.log2(torch.finfo(dtype).tiny)


def _check_mask(mask: Tensor | None, logits: Tensor) -> None:
    if mask is not None and (mask.dtype != torch.bool or mask.shape != logits.shape[1:-1]):
        raise ValueError(
            f"mask must be bool of shape {list(logits.shape[1:-1])}, one per row of logits {list(logits.shape)}; "
            f"got {list(mask.shape)} {mask.dtype}"
        )


def _refuse_undefined(undefined: Tensor, logits: Tensor) -> None:
    """Raise an error that names the first of the marked [N] rows, if any row is marked."""
    if not bool(undefined.any()):
        return
    index = [int(i) for i in torch.unravel_index(undefined.nonzero()[0, 0], logits.shape[1:-1] or (1,))]
    rows = logits
    for i in index if logits.ndim > 2 else ():
        rows = rows[:, i]
    bad = rows.isnan().any(-1) | (rows == math.inf).any(-1) | (rows == -math.inf).all(-1)
    member = int(bad.nonzero()[0, 0])
    row = rows[member]
    found = "NaN" if bool(row.isnan().any()) else "+inf" if bool((row == math.inf).any()) else "only -inf"
    raise ValueError(
        f"logits of member {member} at row {index if logits.ndim > 2 else []} hold {found} "
        f"({int(undefined.sum())} of {len(undefined)} rows have no prediction): expected finite numbers, or -inf for "
        "some of the classes. A diverged chain does this (lower its step size); leave padding out with a mask"
    )
