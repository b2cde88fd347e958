"""Live bytes of tensors at the peak of a pass, against those of a training step with the same batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_bayes.attaching import attach
from hf_bayes.laplace.accumulators import OVERSAMPLING, DiagonalSum
from hf_bayes.laplace.cells import STRUCTURES, CurvatureSpec
from hf_bayes.survey import survey
from tests import models
from tests.models import tiny_llama, with_lora

ROWS, LENGTH, WIDTH, RANK = 8, 96, 64, 300


class Live(TorchDispatchMode):
    """Counts the storages that operations make, until nobody holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in given | self.known and storage.nbytes():
                    self.known.add(storage.data_ptr())
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._forget, storage.data_ptr(), storage.nbytes())
        return result

    def _forget(self, pointer: int, size: int) -> None:
        self.known.discard(pointer)
        self.now -= size


def peak(work: Callable[[], Any]) -> int:
    with Live() as live:
        work()
    return live.peak


def measured(structure: str, *, checkpointing: bool) -> tuple[int, int, int]:
    """Bytes of a training step, of the pass, and of what the structure keeps."""
    model = with_lora(tiny_llama(hidden_size=WIDTH, intermediate_size=2 * WIDTH, vocab_size=64, num_hidden_layers=3))
    ids = torch.randint(3, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    with attach(model) as bayesian:
        if checkpointing:
            models.switch_on_checkpointing(bayesian)
        theta = bayesian.theta[0].detach()

        def step() -> None:
            leaf = theta[None].clone().requires_grad_()
            bayesian.train()
            bayesian.log_lik(leaf, dict(batch), folded=False).loss.sum().backward()

        def look() -> None:
            spec = CurvatureSpec(structure=structure, rank=RANK)
            survey(bayesian, theta, lambda rows: [batch], ROWS, spec, gradient=False)

        factors = theta.nbytes
        if structure.startswith("kronecker"):
            factors += sum(4 * side**2 for shape in bayesian.layout.shapes for side in shape)
        if structure in ("low_rank", "full"):  # the gradients of rows, which mix modules
            factors += ROWS * theta.nbytes
        if structure == "full":
            factors += len(theta) * theta.nbytes
        if structure == "low_rank":  # half of two matrices of float32 and three of float64
            factors += (RANK + OVERSAMPLING) * 4 * theta.nbytes
        return peak(step), peak(look), factors


def within_bound(step: int, look: int, factors: int) -> bool:
    """Beside the factors, for each token the gradient that starts the backward pass, and eight numbers of 64 bits.

    What a structure keeps is there twice for a moment: where it is scaled, or a moment added to it.
    """
    return look <= step + 2 * factors + ROWS * LENGTH * (4 * WIDTH + 64)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_pass_holds_at_most_a_training_step_and_the_factors(structure: str, checkpointing: bool) -> None:
    found = measured(structure, checkpointing=checkpointing)
    assert within_bound(*found)


def test_the_bound_catches_a_pass_that_keeps_what_its_modules_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    add = DiagonalSum.add

    def keep(self: DiagonalSum, share: Any) -> None:
        kept.append(share)
        add(self, share)

    monkeypatch.setattr(DiagonalSum, "add", keep)
    found = measured("diagonal", checkpointing=True)
    assert not within_bound(*found)
