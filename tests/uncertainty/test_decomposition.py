from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_bayes.uncertainty.decomposition import (
    Partial,
    Prediction,
    Uncertainty,
    decompose,
    finish,
    merge,
    mixture,
    partial,
    predict,
)
from tests.uncertainty.brute_force import ATOL, INF, brute_force, check, naive, random_logits


def of_mean_logits(logits: Tensor) -> Uncertainty:
    """A wrong version: logits are averaged instead of probabilities."""
    p = logits.double().softmax(-1)
    total = torch.special.entr(logits.double().mean(0).softmax(-1)).sum(-1)
    aleatoric = torch.special.entr(p).sum(-1).mean(0)
    return Uncertainty(total, aleatoric, total - aleatoric)


def in_bits(logits: Tensor) -> Uncertainty:
    """A wrong version: base-2 logarithms."""
    return Uncertainty(*(part / math.log(2) for part in brute_force(logits).uncertainty))


def with_reversed_kl(logits: Tensor) -> Uncertainty:
    """A wrong version: KL(mixture || p_m) is another quantity of the same size."""
    log_q, (total, aleatoric, _) = brute_force(logits)
    log_p = logits.double().log_softmax(-1)
    return Uncertainty(total, aleatoric, (log_q.exp() * (log_q - log_p)).sum(-1).mean(0))


def in_half_precision(logits: Tensor) -> Uncertainty:
    """A wrong version: bfloat16 logits are never widened."""
    p = logits.bfloat16().softmax(-1)
    total, aleatoric = torch.special.entr(p.mean(0)).sum(-1), torch.special.entr(p).sum(-1).mean(0)
    return Uncertainty(total, aleatoric, total - aleatoric)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 5, 2), (3, 40, 7), (8, 3, 2, 1000), (4, 3, 32000), (33, 2, 50), (6, 11)], ids=str
)
@pytest.mark.parametrize(("scale", "spread"), [(1.0, 1.0), (3.0, 0.1), (8.0, 3.0)])
def test_the_parts_equal_float64_brute_force(
    dtype: torch.dtype, shape: tuple[int, ...], scale: float, spread: float
) -> None:
    logits = random_logits(*shape, scale=scale, spread=spread, dtype=dtype)
    check(decompose, logits)
    check(lambda x: predict(x).uncertainty, logits)
    total = decompose(logits).total
    assert total.shape == shape[1:-1]
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("wrong", [of_mean_logits, in_bits, with_reversed_kl, in_half_precision])
def test_the_check_catches_wrong_formulas(wrong: Callable[[Tensor], Uncertainty]) -> None:
    with pytest.raises(AssertionError):
        check(wrong, random_logits(8, 3, 100))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_mixture_is_the_log_of_the_mean_probability(dtype: torch.dtype) -> None:
    logits = random_logits(8, 4, 3, 500, scale=4.0, dtype=dtype)
    expected = brute_force(logits).log_probs
    # float32 holds a logarithm near 20 to 2e-6, after three roundings.
    tolerance = {"rtol": 0, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 5e-7, "atol": 1e-6}
    assert_close(mixture(logits).double(), expected, **tolerance)
    assert_close(predict(logits).log_probs, mixture(logits), rtol=0, atol=0)
    wrong = logits.double().mean(0).log_softmax(-1)
    with pytest.raises(AssertionError):
        assert_close(wrong, expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_total_is_exactly_aleatoric_plus_epistemic(dtype: torch.dtype) -> None:
    logits = random_logits(5, 300, 30, dtype=dtype)
    streamed = finish(merge(partial(logits[:2]), partial(logits[2:]))).uncertainty
    for total, aleatoric, epistemic in (decompose(logits), predict(logits).uncertainty, streamed):
        assert torch.equal(total, aleatoric + epistemic)
        assert bool((aleatoric >= 0).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_epistemic_lies_between_zero_and_log_num_members(dtype: torch.dtype) -> None:
    for spread in (1e-6, 0.1, 10.0, 300.0):
        epistemic = decompose(random_logits(4, 200, 9, spread=spread, dtype=dtype)).epistemic
        assert bool((epistemic >= 0).all())
        # The bound itself rounds up by as much as 1e-7 in float32.
        assert float(epistemic.max()) <= math.log(4) + (1e-9 if dtype == torch.float64 else 2e-7)


def test_members_sure_of_different_classes_reach_the_bound() -> None:
    for number in (2, 3, 7):
        sure = torch.where(torch.eye(number, 10, dtype=torch.bool), 0.0, -INF)
        found = decompose(sure[:, None])
        assert_close(found.epistemic, torch.tensor([math.log(number)]), rtol=0, atol=2e-6)
        assert_close(found.aleatoric, torch.zeros(1), rtol=0, atol=2e-6)


def test_the_order_of_members_and_classes_does_not_matter() -> None:
    logits = random_logits(7, 20, 60, dtype=torch.float64)
    shuffled = logits[torch.randperm(7)][..., torch.randperm(60)]
    for one, other in zip(decompose(logits), decompose(shuffled), strict=True):
        assert_close(one, other, rtol=0, atol=1e-13)  # a few roundings of numbers near 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", [1, 2, 3, 7, 10])
def test_epistemic_is_exactly_zero_for_equal_members(number: int, dtype: torch.dtype) -> None:
    one = random_logits(1, 50, 101, dtype=dtype)
    one[0, 3, 7:] = -INF
    for logits in (one.repeat(number, 1, 1), one.expand(number, -1, -1)):
        for found in (decompose(logits), predict(logits).uncertainty):
            assert bool((found.epistemic == 0).all())
            assert torch.equal(found.total, found.aleatoric)
    if number > 2 and dtype != torch.float64:
        assert bool((naive(one.repeat(number, 1, 1)).epistemic != 0).any())  # what a difference of entropies gives


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_masked_classes_count_for_nothing(dtype: torch.dtype) -> None:
    logits = random_logits(4, 6, 40, dtype=dtype)
    padded = torch.cat([logits, torch.full((4, 6, 24), -INF, dtype=dtype)], -1)
    check(decompose, padded)
    for one, other in zip(decompose(padded), decompose(logits), strict=True):
        assert_close(one, other, rtol=0, atol=ATOL[dtype])
    log_probs = predict(padded).log_probs
    assert_close(log_probs[:, :40], predict(logits).log_probs, rtol=5e-7, atol=ATOL[dtype])
    assert bool((log_probs[:, 40:] == -INF).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_class_may_be_impossible_for_some_members_only(dtype: torch.dtype) -> None:
    logits = random_logits(4, 30, 12, dtype=dtype)
    logits[torch.rand(4, 30, 12) < 0.5] = -INF
    logits[..., 0] = 0
    check(decompose, logits)
    assert_close(mixture(logits).double(), brute_force(logits).log_probs, rtol=5e-7, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_logits_of_ten_thousand_are_exact(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(5)
    logits = (1e4 * (2 * torch.randint(2, (4, 50, 9), generator=rng) - 1)).to(dtype)
    check(decompose, logits)
    shifted = random_logits(4, 50, 9, dtype=torch.float64).mul(8).round().div(8)  # exact in float32 also after + 1e4
    check(decompose, (shifted + 1e4).to(torch.promote_types(dtype, torch.float32)))
    check(decompose, logits.double().mul(1e300).to(torch.float64) if dtype == torch.float64 else logits)


def test_log_probabilities_survive_where_probabilities_underflow() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        logits = random_logits(4, 5, 30, scale=400.0, spread=100.0, dtype=dtype)
        expected = brute_force(logits).log_probs
        assert float(expected.min()) < -800
        assert_close(mixture(logits).double(), expected, rtol=5e-7, atol=1e-6)
        assert_close(predict(logits).log_probs, mixture(logits), rtol=0, atol=0)
    assert bool((random_logits(4, 5, 30, scale=400.0).softmax(-1).mean(0).log() == -INF).any())


@pytest.mark.parametrize("method", [decompose, predict, mixture, partial])
@pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (INF, "\\+inf"), (None, "only -inf")])
@pytest.mark.parametrize("num_members", [1, 3])
def test_rows_without_a_distribution_are_refused_by_name(
    method: Callable[[Tensor], Any], value: float | None, name: str, num_members: int
) -> None:
    logits = random_logits(num_members, 4, 5, 20)
    member = num_members - 1
    logits[member, 2, 3, slice(None) if value is None else 11] = -INF if value is None else value
    with pytest.raises(ValueError, match=rf"member {member} at row \[2, 3\] hold {name} \(1 of 20 rows"):
        method(logits)


@pytest.mark.parametrize("method", [decompose, predict, mixture, partial])
@pytest.mark.parametrize(
    "logits", [torch.zeros(0, 3, 4), torch.zeros(2, 3, 0), torch.zeros(4), torch.zeros(2, 3, 4, dtype=torch.int64)]
)
def test_what_is_not_logits_of_members_is_refused(method: Callable[[Tensor], Any], logits: Tensor) -> None:
    with pytest.raises(ValueError, match="members first, got"):
        method(logits)


def test_rows_outside_the_mask_are_skipped_and_return_nan() -> None:
    logits = random_logits(3, 6, 10, 40)
    mask = torch.rand(6, 10) < 0.6
    padded = logits.masked_fill(
        ~mask[None, :, :, None], math.nan
    )  # these values would raise an error if they were read
    found, whole = decompose(padded, mask=mask), decompose(logits)
    for one, other in zip(found, whole, strict=True):
        assert_close(one[mask], other[mask], rtol=0, atol=ATOL[torch.float32])
        assert bool(one[~mask].isnan().all())
    with pytest.raises(ValueError, match="NaN"):
        decompose(padded, mask=torch.ones_like(mask))
    assert bool(decompose(logits, mask=torch.zeros_like(mask)).total.isnan().all())


@pytest.mark.parametrize("mask", [torch.ones(6), torch.ones(5, dtype=torch.bool), torch.ones(6, 1, dtype=torch.bool)])
def test_a_mask_of_another_shape_or_type_is_refused(mask: Tensor) -> None:
    with pytest.raises(ValueError, match="mask must be bool of shape \\[6\\]"):
        decompose(random_logits(2, 6, 4), mask=mask)


def stream(logits: Tensor, sizes: list[int]) -> Prediction:
    parts = [partial(part) for part in logits.split(sizes)]
    total = parts[0]
    for part in parts[1:]:
        total = merge(total, part)
    return finish(total)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [[8], [1, 7], [5, 2, 1], [1] * 8])
def test_streaming_over_members_equals_the_whole(sizes: list[int], dtype: torch.dtype) -> None:
    logits = random_logits(8, 6, 300, dtype=dtype)
    logits[..., 250:] = -INF
    logits[3, :, 200:] = -INF
    streamed, whole = stream(logits, sizes), predict(logits)
    assert_close(streamed.log_probs, whole.log_probs, rtol=5e-7, atol=ATOL[dtype])
    for one, other in zip(streamed.uncertainty, whole.uncertainty, strict=True):
        assert_close(one, other, rtol=0, atol=ATOL[dtype])


def test_partials_of_processes_add_up_field_by_field() -> None:
    logits = random_logits(6, 4, 50)
    parts = [partial(logits[:1]), partial(logits[1:3]), partial(logits[3:])]
    added = Partial(*(torch.stack(field).sum(0) for field in zip(*parts, strict=True)))
    for one, other in zip(finish(added).uncertainty, decompose(logits), strict=True):
        assert_close(one, other, rtol=0, atol=2e-6)
    unweighted = torch.stack([finish(part).log_probs.exp() for part in parts]).mean(0).log()
    with pytest.raises(AssertionError):  # wrong: mixtures of 1, 2 and 3 members are averaged as if they were members
        assert_close(unweighted, mixture(logits), rtol=5e-7, atol=2e-6)


def test_a_streamed_single_member_has_no_epistemic_uncertainty() -> None:
    assert bool((finish(partial(random_logits(1, 40, 300))).uncertainty.epistemic == 0).all())


def test_streamed_log_probabilities_are_finite_unless_masked() -> None:
    logits = random_logits(4, 5, 30, scale=400.0)
    logits[..., -1] = -INF
    log_probs = stream(logits, [3, 1]).log_probs
    assert bool(log_probs[:, :-1].isfinite().all())
    assert bool((log_probs[:, -1] == -INF).all())
    seen = mixture(logits) > -80  # above the smallest float32
    assert_close(log_probs[seen], mixture(logits)[seen], rtol=5e-7, atol=2e-6)


def test_partials_of_other_rows_do_not_merge() -> None:
    with pytest.raises(ValueError, match=r"\[4, 50\] and \[5, 50\]"):
        merge(partial(random_logits(2, 4, 50)), partial(random_logits(2, 5, 50)))


def test_gradients_autocast_and_matmul_precision_leave_no_trace() -> None:
    logits = random_logits(8, 6, 500)
    expected = decompose(logits)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = decompose(logits.clone().requires_grad_())
        with torch.inference_mode():
            inside = predict(logits)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert not any(part.requires_grad for part in found)
    for one, two, three in zip(expected, found, inside.uncertainty, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_the_logits_are_left_as_they_were() -> None:
    logits = random_logits(3, 4, 50)
    before = logits.clone()
    decompose(logits), predict(logits), finish(partial(logits)), mixture(logits)
    assert torch.equal(logits, before)
