"""Passes over pairs of answers: references, padding, tied heads, and rows without a term."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.objectives.curvature_pass import CurvaturePassResult, run_curvature_pass
from tests.methods.laplace import brute_force
from tests.objectives.curvature_problems import error
from tests.objectives.pair_problems import (
    PairProblem,
    attached,
    cotangents,
    evaluate_pairs,
    kfac,
    pair_problem,
    run,
)

SPEC = {"estimator": "ef_sequence", "structure": "full"}


@pytest.fixture(scope="module")
def made() -> PairProblem:
    return pair_problem("gpt2", "lora", "dpo")


def expected(made: PairProblem) -> Tensor:
    rows = evaluate_pairs(made)
    return brute_force.outer(rows, cotangents(made, rows, "ef_sequence", 1))


def changed(made: PairProblem, change: Any, reference: Any = None, **spec: Any) -> CurvaturePassResult:
    """Run a pass over batches that were changed, with another reference if one is given."""

    def batches(numbers: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        return (change(batch) for batch in made.batches(4)(numbers))

    with attached(made) as model:
        model.other_reference = reference
        theta = model.theta[0].detach()
        return run_curvature_pass(model, theta, batches, len(made.texts), CurvatureSpec(**(SPEC | spec)))


def test_the_reference_determines_the_curvature(made: PairProblem) -> None:
    wanted = expected(made)
    with attached(made) as model:
        known = model.reference_log_probs(made.collate([0, 1, 2, 3]))
        theta = model.theta[0].detach()
        before = {name: value.clone() for name, value in model.model.state_dict().items()}
        found = run_curvature_pass(model, theta, made.batches(4), 4, CurvatureSpec(**SPEC))
        assert all(torch.equal(value, before[name]) for name, value in model.model.state_dict().items())
        assert error(found.curvature.dense(), wanted) < 1e-10  # float64 sums in another order
        model.reference = theta  # the broken twin: a policy that is its own reference
        wrong = run_curvature_pass(model, theta, made.batches(4), 4, CurvatureSpec(**SPEC))
        assert error(wrong.curvature.dense(), wanted) > 0.01
    given = changed(made, lambda batch: batch | {"ref_logps": known})
    other = changed(made, lambda batch: batch, reference=lambda batch: known)
    for result in (given, other):
        assert error(result.curvature.dense(), wanted) < 1e-10


def test_padding_that_no_mask_tells_of_is_no_position(made: PairProblem) -> None:
    for structure in ("diagonal", "kronecker"):
        unmasked = changed(
            made, lambda batch: {k: v for k, v in batch.items() if k != "attention_mask"}, structure=structure
        )
        found = run(made, estimator="ef_sequence", structure=structure)
        assert error(unmasked.curvature.dense(), found.curvature.dense()) < 1e-9  # float64 sums in another order


def test_a_pair_without_a_label_adds_nothing(made: PairProblem) -> None:
    rows = evaluate_pairs(made)[1:]
    wanted = brute_force.outer(rows, cotangents(made, rows, "ef_sequence", 1))

    def without_first(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch | {"labels": torch.cat([torch.tensor([-100]), batch["labels"][1:]])}

    found = changed(made, without_first)
    assert (found.num_rows, found.num_terms) == (4, 3)
    assert error(found.curvature.dense(), wanted) < 1e-10  # float64 sums in another order


def test_a_tied_head_is_one_tensor() -> None:
    made = pair_problem("gpt2", "embeddings", "dpo")
    made.model.transformer.wte.weight = made.model.lm_head.weight  # type: ignore[union-attr]
    made.subspace, made.head = "wte", torch.nn.Identity()
    made.model.register_module("unused", made.head)
    wanted = expected(made)
    assert error(run(made, **SPEC).curvature.dense(), wanted) < 1e-10  # float64 sums in another order
    diagonal = run(made, estimator="ef_sequence", structure="diagonal").curvature.diagonal
    assert error(diagonal, wanted.diagonal()) < 1e-10


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_answers_that_fill_up_are_no_positions_of_a_head(sharing: str) -> None:
    """The answers of a pair have different lengths, and a random head takes both together."""
    made = pair_problem("gpt2", "head", "dpo")
    rows = evaluate_pairs(made)
    wanted = kfac(made, rows, cotangents(made, rows, "ef_sequence", 1), sharing)
    found = run(made, estimator="ef_sequence", structure="kronecker", sharing=sharing, batch=2)
    assert error(found.curvature.dense(), wanted) < 1e-10  # float64 sums in another order
