"""Live bytes of tensors at the peak of a pass, against those of a training step with the same batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_bayes.core.layout import Layout
from hf_bayes.methods.laplace.accumulators import OVERSAMPLING, DiagonalSum
from hf_bayes.methods.laplace.kronecker import KroneckerSum
from hf_bayes.methods.laplace.supported import STRUCTURES, CurvatureSpec
from hf_bayes.models.attaching import attach
from hf_bayes.objectives.curvature_pass import run_curvature_pass
from tests import tiny_models as models
from tests.tiny_models import tiny_llama, with_lora

RANK = 300


class Case(NamedTuple):
    """A model, what is random in it, and the batch."""

    fields: dict[str, int]
    subspace: str = "trainable"
    rows: int = 8
    length: int = 96


CASES = {
    "lora": Case({"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64}),
    "head": Case({"hidden_size": 64, "intermediate_size": 128, "vocab_size": 1500}, "last_layer"),
    "block": Case({"hidden_size": 192, "intermediate_size": 768, "vocab_size": 64}, "last_block"),
    # a step that is small beside the factors, so that the end of the pass is what counts
    "few tokens": Case({"hidden_size": 192, "intermediate_size": 768, "vocab_size": 64}, "last_block", 2, 8),
}


class Bytes(NamedTuple):
    """The memory of a training step and of the pass, and the terms that bound it.

    Attributes:
        kept: by the structure.
        gradients: of rows in the largest module, as often as they are there.
        decomposing: what the end needs beside ``kept``: of the longest side a copy and eigenvectors, in float64.
        tokens: for each the gradient that starts the backward pass, and eight numbers of 64 bits.
    """

    step: int
    data_pass: int
    kept: int
    gradients: int
    decomposing: int
    tokens: int

    @property
    def within_bound(self) -> bool:
        return self.data_pass <= max(self.step + self.gradients, self.decomposing) + self.kept + self.tokens


class Live(TorchDispatchMode):
    """A count of the storages that operations make, until they are freed."""

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


def sides(layout: Layout) -> list[int]:
    """Return the sides of the factors, each once: modules that read the same input share the factor of that input."""
    found: list[int] = []
    for name, shape in layout.named_shapes.items():
        shared = any(word in name for word in ("k_proj", "v_proj", "up_proj")) and "lora_B" not in name
        found += (shape[:1] if shared else shape) if len(shape) == 2 else ()
    return found


def measured(structure: str, *, checkpointing: bool = False, part: str = "lora") -> Bytes:
    case = CASES[part]
    model: Any = tiny_llama(num_hidden_layers=3, **case.fields)
    model = with_lora(model) if part == "lora" else model
    ids = torch.randint(3, 64, (case.rows, case.length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    with attach(model, subspace=case.subspace) as bayesian:
        if checkpointing:
            models.switch_on_checkpointing(bayesian)
        theta = bayesian.theta[0].detach()

        def step() -> None:
            leaf = theta[None].clone().requires_grad_()
            bayesian.train()
            bayesian.log_lik(leaf, dict(batch), folded=False).loss.sum().backward()

        def data_pass() -> None:
            spec = CurvatureSpec(structure=structure, rank=RANK)
            run_curvature_pass(bayesian, theta, lambda rows: [batch], case.rows, spec, gradient=False)

        kept, decomposing = theta.nbytes, 0
        if structure.startswith("kronecker"):
            kept += sum(4 * side**2 for side in sides(bayesian.layout))
            decomposing = 16 * max(sides(bayesian.layout)) ** 2
        if structure == "full":  # twice: it is scaled
            kept += 2 * len(theta) * theta.nbytes
        if structure == "low_rank":  # two matrices of float32 and three of float64
            kept += (RANK + OVERSAMPLING) * 8 * theta.nbytes
        times = {"diagonal": 1, "kronecker": 0, "kronecker_corrected": 2}.get(structure)  # the last turns them
        largest = max(bayesian.layout.sizes) * (1 if part == "head" else case.rows)  # a head goes row by row
        # of structures that mix modules all modules' at once
        gradients = case.rows * theta.nbytes * 2 if times is None else 4 * times * largest
        tokens = case.rows * case.length * (4 * case.fields["hidden_size"] + 64)
        return Bytes(peak(step), peak(data_pass), kept, gradients, decomposing, tokens)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_pass_holds_at_most_a_training_step_and_the_factors(structure: str, checkpointing: bool) -> None:
    assert measured(structure, checkpointing=checkpointing).within_bound


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "kronecker_corrected"])
@pytest.mark.parametrize("part", ["head", "block", "few tokens"])
def test_long_sides_add_the_decomposition_of_one_factor_only(part: str, structure: str) -> None:
    assert measured(structure, part=part).within_bound


@pytest.mark.parametrize("structure", ["kronecker", "kronecker_corrected"])
def test_the_bound_catches_factors_kept_after_decomposition(monkeypatch: pytest.MonkeyPatch, structure: str) -> None:
    kept: list[Any] = []
    spectrum = KroneckerSum._spectrum

    def keep(self: KroneckerSum, factors: dict[Any, Tensor], key: Any) -> Any:
        kept.append(factors[key])
        return spectrum(self, factors, key)

    monkeypatch.setattr(KroneckerSum, "_spectrum", keep)
    assert not measured(structure, part="few tokens").within_bound


def test_the_bound_catches_a_pass_that_keeps_module_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    add = DiagonalSum.add

    def keep(self: DiagonalSum, record: Any) -> None:
        kept.append(record)
        add(self, record)

    monkeypatch.setattr(DiagonalSum, "add", keep)
    assert not measured("diagonal", checkpointing=True).within_bound
