from __future__ import annotations

import pytest
import torch

from hf_bayes.core.types import HeldOut
from hf_bayes.models.attaching import attach
from hf_bayes.objectives.heldout import HeldOutRows
from tests.methods.laplace import brute_force
from tests.objectives.curvature_problems import evaluated

PARTS = [
    ("bert", "lora", "classes"),
    ("bert", "head", "tokens"),
    ("gpt2", "lora", "lm"),
    ("bert", "head", "regression"),
]


@pytest.mark.parametrize(("family", "part", "task"), PARTS)
@pytest.mark.parametrize("rows", ["all", "odd"])
def test_gradient_of_held_out_nats_is_that_of_finite_differences(family: str, part: str, task: str, rows: str) -> None:
    made, _ = evaluated(family, part, task)
    noise = {"noise_std": brute_force.NOISE} if task == "regression" else {}
    with attach(made.model, subspace=made.subspace, **noise) as model:
        ask = HeldOutRows(model, made.batches(2), len(made.rows), hide=True)
        rng = torch.Generator().manual_seed(0)
        mean = model.theta.detach()[0].cpu()
        draws = mean + 0.3 * torch.randn(4, len(mean), generator=rng, dtype=torch.float64)
        nats, grad = ask(draws, HeldOut(rows), gradient=True)
        assert grad is not None
        assert ask(draws, HeldOut(rows), gradient=False) == (pytest.approx(nats, abs=1e-12), None)
        direction = torch.randn(draws.shape, generator=rng, dtype=torch.float64)

        def along(step: float) -> float:
            return ask(draws + step * direction, HeldOut(rows), gradient=False)[0]

        slope = (8 * (along(1e-4) - along(-1e-4)) - along(2e-4) + along(-2e-4)) / 12e-4
        expected = float((grad * direction).sum())
        # a stencil of fourth order with steps of 1e-4; Llama-like models compute norms in float32, these do not
        assert slope == pytest.approx(expected, rel=1e-6)
        each = [ask(draws[k : k + 1], HeldOut(rows), gradient=True)[1] for k in range(4)]
        alone = float((torch.cat([g for g in each if g is not None]) / 4 * direction).sum())
        assert abs(alone / slope - 1) > 1e-4  # the twin: the mean of members' nats is not the mixture's


def test_the_nats_of_more_members_are_estimated_from_fewer() -> None:
    made, _ = evaluated("bert", "head", "classes")
    with attach(made.model, subspace=made.subspace) as model:
        ask = HeldOutRows(model, made.batches(2), len(made.rows), hide=True)
        rng = torch.Generator().manual_seed(0)
        mean = model.theta.detach()[0].cpu()
        draws = mean + 0.1 * torch.randn(64, len(mean), generator=rng, dtype=torch.float64)

        def nats(draws: torch.Tensor, members: int | None = None) -> float:
            return ask(draws, HeldOut("all", members), gradient=False)[0]

        whole = nats(draws)
        parts = draws.split(4)
        plain, estimated = (torch.tensor([nats(part, members) for part in parts]) for members in (None, 64))
    error = 3 * float((estimated - plain).std()) / len(parts) ** 0.5  # three standard errors of the correction
    assert abs(float(estimated.mean()) - whole) < error
    assert float(plain.mean()) - whole > error  # the twin: four members are no estimate of sixty-four
