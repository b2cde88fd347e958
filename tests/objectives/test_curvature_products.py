from __future__ import annotations

from typing import Any

import pytest

from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.models.attaching import attach
from hf_bayes.objectives.curvature_pass import run_curvature_pass
from tests.objectives.curvature_problems import SHARED, error, evaluated, run


@pytest.mark.parametrize(("structure", "sharing"), SHARED)
@pytest.mark.parametrize(("family", "part", "task"), [
    ("gpt2", "lora", "lm"), ("bert", "lora", "classes"), ("gpt2", "block", "lm"), ("bert", "block", "classes"),
])  # fmt: skip
def test_batches_do_not_matter(family: str, part: str, task: str, structure: str, sharing: str) -> None:
    made, _ = evaluated(family, part, task)
    whole = run(made, batch=3, structure=structure, sharing=sharing, num_samples=2)
    for size in (1, 2):
        parts = run(made, batch=size, structure=structure, sharing=sharing, num_samples=2)
        assert error(parts.curvature.dense(), whole.curvature.dense()) < 1e-9  # float64 sums in another order
        assert parts.log_lik == pytest.approx(whole.log_lik, rel=1e-12)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_padding_that_no_mask_tells_of_is_no_position(sharing: str) -> None:
    made, _ = evaluated("gpt2", "lora", "lm")
    spec = CurvatureSpec(structure="kronecker", sharing=sharing)

    def unmasked(numbers: Any) -> Any:
        return ({k: v for k, v in batch.items() if k != "attention_mask"} for batch in made.batches(3)(numbers))

    with attach(made.model, subspace=made.subspace) as model:
        theta = model.theta[0].detach()
        found, expected = (
            run_curvature_pass(model, theta, batches, 3, spec) for batches in (unmasked, made.batches(1))
        )
    assert error(found.curvature.dense(), expected.curvature.dense()) < 1e-9  # float64 sums in another order
