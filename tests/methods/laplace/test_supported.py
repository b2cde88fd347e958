from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes.core.likelihood_facts import LikelihoodFacts
from hf_bayes.methods.laplace.estimators import ESTIMATORS
from hf_bayes.methods.laplace.supported import STRUCTURES, CurvatureSpec, table
from tests.methods.laplace.brute_force import Problem
from tests.objectives.curvature_problems import evaluated, run

pytestmark = pytest.mark.models


@pytest.mark.parametrize(("estimator", "structure"), list(itertools.product(ESTIMATORS, STRUCTURES)))
def test_the_table_says_which_cells_exist(estimator: str, structure: str) -> None:
    row = next(line for line in table().splitlines() if line.startswith(f"| {estimator} "))
    exists = row.split("|")[2 + STRUCTURES.index(structure)].strip() == "yes"
    spec = CurvatureSpec(estimator=estimator, structure=structure)
    made, _ = evaluated("bert", "head", "classes")
    if exists:
        assert run(made, estimator=estimator, structure=structure).curvature.dim == made.layout.dim
    else:
        with pytest.raises(ValueError, match=f"there is no structure='{structure}' of estimator='{estimator}'"):
            spec.check()


def test_the_documented_table_is_the_printed_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "laplace.md").read_text(encoding="utf-8")
    assert page.split("<!-- table -->\n")[1].split("\n<!-- /table -->")[0] == table()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": "fisher"}, "estimator must be one of ggn, ef_sequence, ef_token, hessian, got 'fisher'"),
        ({"structure": "block"}, "structure must be one of"),
        ({"sharing": "mean"}, "sharing must be 'expand' or 'reduce'"),
    ],
)
def test_unknown_cells_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(evaluated("bert", "head", "classes")[0], **changes)


@pytest.mark.parametrize(
    ("limit", "changes", "message"),
    [
        ("MAX_FULL", {"structure": "full"}, "36 x 36; the limit is 10"),
        ("MAX_HESSIAN", {"estimator": "hessian"}, "each of 36 elements; the limit is 10"),
    ],
)
def test_what_is_too_large_is_refused_before_the_pass(
    limit: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = evaluated("gpt2", "head", "lm")
    monkeypatch.setattr(f"hf_bayes.methods.laplace.supported.{limit}", 10)
    monkeypatch.setattr(Problem, "batches", lambda *args: lambda numbers: pytest.fail("rows were read"))
    with pytest.raises(ValueError, match=message):
        run(made, **changes)


@pytest.mark.parametrize(
    ("spec", "most_terms", "root_columns", "lacks", "exact"),
    [
        (CurvatureSpec(), 1, 1, [], True),
        (CurvatureSpec(num_samples=6), 3, 2, [], True),
        (CurvatureSpec(num_samples=5), 3, 2, [], False),
        (CurvatureSpec(structure="full"), 1, 16, [], True),
        (CurvatureSpec(structure="full"), 1, 17, [], False),
        (CurvatureSpec(structure="full", num_samples=17), 1, 17, [], True),
        (CurvatureSpec(structure="full"), 1, 16, ["fisher"], False),
        (CurvatureSpec(), 1, 1, ["fisher"], False),
        (CurvatureSpec(), None, 1, [], False),  # a stream, whose terms are not counted
        (CurvatureSpec(), 1, None, [], False),
        (CurvatureSpec(estimator="ef_token"), 1, 1, [], False),
    ],
)
def test_a_ggn_is_exact_where_that_takes_few_more_passes(
    spec: CurvatureSpec, most_terms: int | None, root_columns: int | None, lacks: list[str], exact: bool
) -> None:
    found = spec.exact_if_cheap(LikelihoodFacts(most_terms, root_columns, lacks=frozenset(lacks)))
    assert found == (replace(spec, num_samples=None) if exact else spec)


@pytest.mark.parametrize(
    ("shapes", "changes", "structure"),
    [
        ([(3, 4), (3,)], {}, "kronecker"),
        ([(3, 4), (3,)], {"structure": "diagonal"}, "diagonal"),
        ([(12,), (3, 4, 2)], {}, "diagonal"),  # no matrix
        ([(3, 4)], {"estimator": "hessian"}, "diagonal"),
        ([(8, 4096)] * 3, {}, "kronecker"),
        ([(8, 4096)] * 4, {}, "diagonal"),  # 2^26 numbers for the long sides alone
        ([(8, 4096)] * 4, {"max_factor": 4095}, "kronecker"),
        ([(8, 4096)] * 4, {"bias": "factor"}, "kronecker"),
        ([(8, 768), (768, 8)] * 24, {}, "kronecker"),  # queries and values of BERT-base, as docs/laplace.md says
        ([(8, 1024), (1024, 8)] * 48, {}, "diagonal"),  # and of BERT-large
    ],
)
def test_the_default_is_kfac_where_its_factors_fit(
    shapes: list[tuple[int, ...]], changes: dict[str, Any], structure: str
) -> None:
    spec = CurvatureSpec(**changes)
    assert spec.of_model(shapes) == replace(spec, structure=structure)


@pytest.mark.parametrize(("given", "same"), [({}, "kronecker"), ({"estimator": "hessian"}, "diagonal")])
def test_a_pass_without_a_structure_takes_the_default(given: dict[str, str], same: str) -> None:
    made, _ = evaluated("bert", "head", "classes")
    found, expected = (run(made, **given, **structure).curvature for structure in ({}, {"structure": same}))
    assert type(found) is type(expected)
    assert torch.equal(found.diagonal, expected.diagonal)
