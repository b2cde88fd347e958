from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_bayes.uncertainty.decomposition import Uncertainty, decompose, mixture, partial, predict
from tests.uncertainty.brute_force import brute_force, naive, random_logits


def relative_error(method: Callable[[Tensor], Uncertainty], logits: Tensor) -> float:
    expected = brute_force(logits).uncertainty.epistemic
    return float(((method(logits).epistemic - expected) / expected).abs().max())


@pytest.mark.parametrize("spread", [1e-4, 1e-3, 1e-2, 3e-2, 1e-1])
def test_small_epistemic_uncertainty_keeps_three_digits(spread: float) -> None:
    # float32 probabilities have errors of 1e-7, so ratios of members that differ by 1e-4 have relative errors of 1e-3.
    logits = random_logits(8, 6, 2000, scale=3.0, spread=spread)
    assert relative_error(decompose, logits) < 1e-3
    assert relative_error(lambda x: predict(x).uncertainty, logits) < 1e-3


def test_a_difference_of_entropies_loses_small_epistemic_values() -> None:
    assert relative_error(naive, random_logits(8, 6, 2000, scale=3.0, spread=1e-4)) > 1


class CountExponentials(TorchDispatchMode):
    """Count the elements that an exponential is computed of."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in {"exp", "exp2", "expm1", "_softmax", "_log_softmax", "sigmoid", "logsumexp", "logaddexp", "pow"}:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_a_logit_costs_one_exponential() -> None:
    logits = random_logits(4, 10, 700)
    for method in (decompose, predict, mixture, partial):
        with CountExponentials() as count:
            method(logits)
        assert 0 <= count.elements - logits.numel() <= 2 * 10  # plus one or two powers of two per row
    with CountExponentials() as count:
        brute_force(logits)
    assert count.elements > logits.numel()
