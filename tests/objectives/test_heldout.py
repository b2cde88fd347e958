from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hf_bayes.models.attaching import attach
from hf_bayes.objectives.heldout import HeldOutRows
from hf_bayes.uncertainty.custom.weighted import Weighted
from tests.methods.laplace import brute_force
from tests.objectives.curvature_problems import evaluated
from tests.tiny_models import batch, tiny_bert

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
        nats, grad = ask.of_mixture(draws, rows, gradient=True)
        assert grad is not None
        assert ask.of_mixture(draws, rows) == (pytest.approx(nats, abs=1e-12), None)
        direction = torch.randn(draws.shape, generator=rng, dtype=torch.float64)

        def along(step: float) -> float:
            return ask.of_mixture(draws + step * direction, rows)[0]

        slope = (8 * (along(1e-4) - along(-1e-4)) - along(2e-4) + along(-2e-4)) / 12e-4
        expected = float((grad * direction).sum())
        # a stencil of fourth order with steps of 1e-4; Llama-like models compute norms in float32, these do not
        assert slope == pytest.approx(expected, rel=1e-6)
        each = [ask.of_mixture(draws[k : k + 1], rows, gradient=True)[1] for k in range(4)]
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
            return ask.of_mixture(draws, "all", num_members=members)[0]

        whole = nats(draws)
        parts = draws.split(4)
        plain, estimated = (torch.tensor([nats(part, members) for part in parts]) for members in (None, 64))
    error = 3 * float((estimated - plain).std()) / len(parts) ** 0.5  # three standard errors of the correction
    assert abs(float(estimated.mean()) - whole) < error
    assert float(plain.mean()) - whole > error  # the twin: four members are no estimate of sixty-four


@pytest.mark.parametrize(("family", "part", "task"), PARTS)
def test_the_scores_of_rows_add_up_to_the_mixtures(family: str, part: str, task: str) -> None:
    made, _ = evaluated(family, part, task)
    noise = {"noise_std": brute_force.NOISE} if task == "regression" else {}
    with attach(made.model, subspace=made.subspace, **noise) as model:
        rng = torch.Generator().manual_seed(0)
        mean = model.theta.detach()[0].cpu()
        draws = mean + 0.3 * torch.randn(6, len(mean), generator=rng, dtype=torch.float64)

        def ask(mesh: Any = None) -> HeldOutRows:
            return HeldOutRows(model, made.batches(2), len(made.rows), mesh=mesh, hide=True)

        found = ask().by_row(draws, "even", num_groups=2)
        for group, scores in enumerate(found):
            nats, _ = ask().of_mixture(draws[3 * group : 3 * group + 3], "even")
            assert scores.nll.sum() / scores.terms.sum() == pytest.approx(nats, abs=1e-12)
            assert len(scores.nll) == -(-len(made.rows) // 2)
        for group, scores in enumerate(ask().by_row(draws, "all", num_groups=2, num_members=64)):
            nats, _ = ask().of_mixture(draws[3 * group : 3 * group + 3], "all", num_members=64)
            assert scores.nll.sum() / scores.terms.sum() == pytest.approx(nats, abs=1e-12)
        alone = [ask().by_row(draws[:1], part)[0].nll for part in ("all", "even")]
        assert alone[0][::2] == pytest.approx(alone[1], abs=1e-12)  # the order of the rows
        shares = [ask(OneOfTwo(rank)).by_row(draws[:1], "all")[0] for rank in range(2)]
        assert shares[0].nll + shares[1].nll == pytest.approx(alone[0], abs=1e-12)
        assert (shares[0].terms * shares[1].terms == 0).all()  # before their sum over processes


class OneOfTwo:
    """One of two processes that share the rows, without their sum."""

    def __init__(self, rank: int) -> None:
        self.data_rank, self.data_size = rank, 2

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize("weighted", [False, True])
def test_each_of_several_labels_has_a_mixture_of_its_own(weighted: bool) -> None:
    labels = (torch.arange(12).view(3, 4) % 3 == 0).double()
    given = torch.cat([labels, torch.tensor([[3.0], [0.5], [0.0]])], 1) if weighted else labels
    rows = {**batch(), "labels": given}
    bert = tiny_bert(dtype=torch.float64, num_labels=4, problem_type="multi_label_classification")
    with attach(bert, subspace="last_layer", likelihood=Weighted() if weighted else None) as model:
        ask = HeldOutRows(model, lambda numbers: [{k: v[list(numbers)] for k, v in rows.items()}], 3, hide=True)
        rng = torch.Generator().manual_seed(0)
        mean = model.theta.detach()[0].cpu()
        draws = mean + 0.5 * torch.randn(4, len(mean), generator=rng, dtype=torch.float64)
        direction = torch.randn(draws.shape, generator=rng, dtype=torch.float64)
        with model.showing(draws), torch.no_grad():
            statistics, _ = model.evaluate_batch(rows)
        nats, grad = ask.of_mixture(draws, "all", gradient=True)
        (scores,) = ask.by_row(draws, "all")

        def along(step: float) -> float:
            return ask.of_mixture(draws + step * direction, "all")[0]

        slope = (8 * (along(1e-4) - along(-1e-4)) - along(2e-4) + along(-2e-4)) / 12e-4
    assert nats == pytest.approx(float(statistics["nll"].mean()), rel=1e-12)
    assert scores.nll == pytest.approx(statistics["nll"].numpy(), rel=1e-12)
    assert scores.terms.tolist() == [1, 1, 1]
    assert grad is not None
    assert float((grad * direction).sum()) == pytest.approx(slope, rel=1e-6)  # the stencil has fourth order
    joint = math.log(4) - statistics["member_log_lik"].sum(1).logsumexp(-1).mean()
    assert abs(nats - float(joint)) > 1e-3  # the twin: a member predicts all labels of a row together
