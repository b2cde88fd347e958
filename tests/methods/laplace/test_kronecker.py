from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_bayes.methods.laplace.kronecker import KroneckerSum
from hf_bayes.methods.laplace.kronecker_curvature import DiagonalFactor
from tests.methods.laplace import brute_force
from tests.objectives.curvature_problems import CELLS, TOLERANCE, cotangents, error, evaluated, problems, run

pytestmark = pytest.mark.models


@problems
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("estimator", "samples"), CELLS)
def test_kfac_is_its_dense_definition(
    family: str, part: str, task: str, estimator: str, samples: int | None, sharing: str
) -> None:
    made, rows = evaluated(family, part, task)
    expected = brute_force.kfac(made, rows, cotangents(made, rows, estimator, samples), sharing)
    found = run(made, estimator=estimator, num_samples=samples, structure="kronecker", sharing=sharing, gradient=False)
    assert error(found.curvature.dense(), expected) < TOLERANCE.get(family, 1e-7)


@problems
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("estimator", "samples"), CELLS)
def test_corrected_eigenvalues_are_moments_in_the_kfac_basis(
    family: str, part: str, task: str, estimator: str, samples: int | None, sharing: str
) -> None:
    made, rows = evaluated(family, part, task)
    own_cotangents, tolerance = cotangents(made, rows, estimator, samples), TOLERANCE.get(family, 1e-7)
    moments, options = brute_force.outer(rows, own_cotangents), {"estimator": estimator, "num_samples": samples}
    found, plain = (
        run(made, structure=structure, sharing=sharing, gradient=False, **options).curvature.blocks  # type: ignore[attr-defined]
        for structure in ("kronecker_corrected", "kronecker")
    )
    start, uncorrected = 0, []
    for name, block, before in zip(made.layout.names, found, plain, strict=True):
        size = block.dim
        own = moments[start : start + size, start : start + size]
        start += size
        if own.abs().max() < 1e-20:  # the bias of BERT's keys does nothing
            continue
        if isinstance(block, DiagonalFactor):
            assert error(block.values, own.diagonal()) < tolerance
            continue
        assert torch.equal(block.left, before.left)
        assert torch.equal(block.right, before.right)
        basis = torch.kron(block.left.contiguous(), block.right.contiguous())
        wanted = (basis.T @ own @ basis).diagonal().view_as(block.eigenvalues)
        factors = brute_force.factors(made, name, rows, own_cotangents, sharing)
        for axis, (factor, size, vectors) in enumerate(zip(*factors, (block.left, block.right), strict=True)):
            # below the rounding of what was summed, of float32 within some modules: 0
            null = (vectors.T @ factor @ vectors).diagonal() < (1e-12 if family == "llama" else 1e-14) * size
            if null.any():  # one eigenspace, whose vectors share the mean
                wanted = wanted.movedim(axis, 0).clone()
                wanted[null] = wanted[null].mean(0)
                wanted = wanted.movedim(0, axis)
        assert error(block.eigenvalues, wanted) < tolerance
        uncorrected.append(error(before.eigenvalues, wanted))
    if part != "head":  # there K-FAC may be the curvature itself: of regression it is
        assert max(uncorrected) > 0.01  # the broken twin


def test_a_long_side_gets_a_diagonal_factor() -> None:
    made, rows = evaluated("gpt2", "head", "lm")
    own = cotangents(made, rows, "ggn", 2)
    g = torch.cat([row.vjp(c)["lm_head.weight"] for row, cs in zip(rows, own, strict=True) for c in cs])
    x = torch.cat([row.inputs["lm_head.weight"] for row in rows])
    found = run(made, structure="kronecker", num_samples=2, max_factor=4)
    assert found.curvature.blocks[0].left is None  # type: ignore[attr-defined]
    expected = torch.kron(torch.diag(g.square().sum(0)), x.T @ x / len(x))
    assert error(found.curvature.dense(), expected) < 1e-7
    assert "longer than max_factor=4" in found.fallbacks["lm_head.weight"]


def test_query_key_and_value_share_one_input_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = evaluated("llama", "lora", "lm")
    sources: dict[str, int] = {}
    add = KroneckerSum.add

    def spy(self: KroneckerSum, record: Any) -> None:
        sources[record.layer.path.split("self_attn.")[1]] = record.source
        add(self, record)

    monkeypatch.setattr(KroneckerSum, "add", spy)
    run(made, structure="kronecker", gradient=False)
    inputs = {sources[f"{name}_proj.lora_A.default"] for name in "qkv"}
    assert len(inputs) == 1
    assert len(set(sources.values())) == 4  # and the input of each B
