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
  rounding error of 1e-6. Where the KL sum is too coarse as well, ``small_epistemic`` computes the rows again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.uncertainty.member_block import LN2, MemberBlock, RowSums, entropy, log2_floor, small_epistemic
from hf_bayes.uncertainty.row_blocks import RowBlocks


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
        log_scale = (block[0].amax(-1, keepdim=True) / num_members).log2().round_()  # see MemberBlock
        mean = block[0] * ((-log_scale).exp2() / num_members)
        log_mean = mean.log2()
        log_probs[rows] = (log_mean + log_scale).mul_(LN2)
        cross = mean * log_mean.clamp_(min=log2_floor(mean.dtype))
        total[rows] = entropy(mean.sum(-1).to(total.dtype), cross.sum(-1).to(total.dtype))
    total = total.view(shape[:-1])
    epistemic = (total - sums.entropies / num_members).clamp(min=0).minimum(num_members.to(total.dtype).log())
    return Prediction(log_probs.view(shape), _identity(total, epistemic, blocks.dtype))


def _members(blocks: RowBlocks, mask: Tensor | None = None) -> Iterator[tuple[slice | Tensor, MemberBlock]]:
    """Yield the indices of a block's rows among the N rows, and the members' distributions on these rows.

    The distributions are valid until the next block.
    """
    for rows, block in blocks.rows(mask):
        yield rows, MemberBlock(block, *blocks.buffers(block))


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
    numbers = RowSums.of(sums, blocks.sum_dtype)
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
            epistemic[rows] = small_epistemic(block, *blocks.buffers(block)).to(epistemic.dtype)
    # for one member epistemic uncertainty is 0: total - total is also NaN outside the mask
    return total, total - total if num_members == 1 else epistemic.clamp(min=0, max=math.log(num_members))


def _identity(total: Tensor, epistemic: Tensor, dtype: torch.dtype) -> Uncertainty:
    """Return the three uncertainties in ``dtype``.

    The total is computed last, as a sum: rounding each one separately would break the identity.
    """
    aleatoric = (total - epistemic).clamp_(min=0).to(dtype)
    epistemic = epistemic.to(dtype)
    return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)


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
