"""Every combination of estimator x structure x subspace x likelihood against its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.core.layout import initial, select
from hf_bayes.methods.laplace.kronecker import KroneckerSum
from hf_bayes.methods.laplace.supported import STRUCTURES, CurvatureSpec
from hf_bayes.models.attaching import attach
from hf_bayes.objectives.curvature_pass import run_curvature_pass
from tests.members.subject_models import convnext, resnet
from tests.methods.laplace import brute_force
from tests.methods.laplace.brute_force import problem
from tests.objectives.curvature_problems import SHARED, TOLERANCE, cotangents, error, evaluated, problems, run
from tests.tiny_models import images


def test_the_comparison_catches_wrong_curvatures() -> None:
    """Broken twins: the wrong square, the wrong labels, the wrong N, other weight sharing."""
    made, rows = evaluated("gpt2", "lora", "lm")
    per_token = brute_force.outer(rows, cotangents(made, rows, "ef_token", None))
    per_row = brute_force.outer(rows, cotangents(made, rows, "ef_sequence", 1))
    assert error(run(made, estimator="ef_sequence", structure="full").curvature.dense(), per_token) > 0.01
    assert error(run(made, estimator="ef_token", num_samples=None, structure="full").curvature.dense(), per_row) > 0.01
    assert error(run(made, estimator="ggn", num_samples=2, seed=1, structure="full").curvature.dense(),
                 brute_force.outer(rows, cotangents(made, rows, "ggn", 2))) > 0.01  # fmt: skip
    doubled = run(made, estimator="ef_sequence", structure="full", scale=2.0)
    assert error(doubled.curvature.dense(), 2 * per_row) < 1e-7
    assert error(doubled.curvature.dense(), per_row) > 0.01
    reduce = brute_force.kfac(made, rows, cotangents(made, rows, "ef_sequence", 1), "reduce")
    assert error(run(made, estimator="ef_sequence", structure="kronecker").curvature.dense(), reduce) > 0.01


SHARED += [(structure, "reduce") for structure in STRUCTURES if structure.startswith("kronecker")]


def test_a_basis_that_rounding_chose_would_let_batches_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: moments in the null spaces of the factors as they come. 3 rows are fewer than the widths."""
    spectrum = KroneckerSum._spectrum
    monkeypatch.setattr(KroneckerSum, "_spectrum", lambda *args: spectrum(*args)._replace(num_null=0))
    made, _ = evaluated("gpt2", "lora", "lm")
    one, other = (
        run(made, batch=batch, structure="kronecker_corrected", sharing="reduce", num_samples=2).curvature.dense()
        for batch in (1, 3)
    )
    assert error(one, other) > 1e-4


@problems
def test_the_hessian_is_that_of_autograd(family: str, part: str, task: str) -> None:
    made, _ = evaluated(family, part, task)
    layout, named = made.layout, dict(made.model.named_parameters())
    start = layout.flatten({name: named[name].detach() for name in layout.names})

    def minus_log_lik(theta: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for row in made.rows:
            inputs = {"input_ids": row["input_ids"], "attention_mask": torch.ones_like(row["input_ids"])}
            logits = torch.func.functional_call(made.model, layout.unflatten(theta), (), inputs).logits
            if task == "regression":
                total = total + 0.5 * ((row["labels"] - logits) / brute_force.NOISE).square().sum()
            elif task == "lm":
                wanted = row["labels"][0, 1:]
                total = total + torch.nn.functional.cross_entropy(logits[0, :-1], wanted, reduction="sum")
            else:
                answers = logits.flatten(0, -2)
                total = total + torch.nn.functional.cross_entropy(answers, row["labels"].flatten(), reduction="sum")
        return total

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.autograd.functional.hessian(minus_log_lik, start)
    found = run(made, estimator="hessian", structure="full").curvature.dense()
    tolerance = TOLERANCE.get(family, 1e-7)
    assert error(found, expected) < tolerance
    diagonal = run(made, estimator="hessian", structure="diagonal").curvature.dense()
    assert error(diagonal, torch.diag(expected.diagonal())) < tolerance


@pytest.mark.parametrize("estimator", ["hessian", "ggn"])
def test_every_estimator_refuses_what_has_no_expansion(estimator: str) -> None:
    made, spec = problem("gpt2", "lora", "lm"), CurvatureSpec(estimator=estimator, structure="diagonal")

    def ignored(numbers: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        for batch in made.batches(3)(numbers):
            yield {**batch, "labels": torch.full_like(batch["labels"], -100)}

    with attach(made.model, subspace=made.subspace) as model:
        theta = model.theta[0].detach()
        assert run_curvature_pass(model, theta, made.batches(3), len(made.rows), spec, gradient=False).gradient is None
        with pytest.raises(ValueError, match="the data hold no likelihood term"):
            run_curvature_pass(model, theta, ignored, len(made.rows), spec)
        with pytest.raises(ValueError, match="the log-likelihood at the given weights is not finite"):
            run_curvature_pass(model, theta * torch.nan, made.batches(3), len(made.rows), spec)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_bfloat16_base_gives_float32_curvature(structure: str) -> None:
    wide, narrow = problem("llama", "lora", "lm"), problem("llama", "lora", "lm")
    for name, parameter in narrow.model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora" in name else torch.bfloat16)
    expected, found = (run(made, estimator="ef_sequence", structure=structure) for made in (wide, narrow))
    assert found.curvature.dense().dtype == torch.float32
    assert found.curvature.dense().isfinite().all()
    # bfloat16 has 8 bits: a few per cent after two blocks
    assert float(found.curvature.diagonal.sum() / expected.curvature.diagonal.sum()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("make", [resnet, convnext], ids=["batch normalisation", "channels first"])
def test_convolutions_have_the_curvature_of_their_rows(make: Callable[[torch.dtype], nn.Module]) -> None:
    """Batch normalisation has the statistics of the model here, so that a row has a likelihood of its own."""
    model = make(torch.float64)
    layout, rows = select(model, "."), images(4, dtype=torch.float64)["pixel_values"]
    theta, labels, gradients = initial(model, layout), torch.tensor([0, 2, 1, 2]), []
    for pixels, label in zip(rows, labels, strict=True):
        leaf = theta.clone().requires_grad_()
        logits = torch.func.functional_call(model, layout.unflatten(leaf), (pixels[None],)).logits
        gradients.append(torch.autograd.grad(torch.nn.functional.cross_entropy(logits, label[None]), leaf)[0])
    expected = torch.stack(gradients).T @ torch.stack(gradients)

    def batches(numbers: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        for few in (numbers[:3], numbers[3:]):
            yield {"pixel_values": rows[list(few)], "labels": labels[list(few)]}

    with attach(model, subspace=".") as bayesian:
        for structure in STRUCTURES:
            spec = CurvatureSpec(estimator="ef_sequence", structure=structure, rank=4)
            found = run_curvature_pass(bayesian, theta, batches, 4, spec)
            kept = layout.flatten({
                name: torch.full(shape, not structure.startswith("kronecker") or name in found.fallbacks)
                for name, shape in layout.named_shapes.items()
            })  # fmt: skip
            assert error(found.curvature.diagonal[kept], expected.diagonal()[kept]) < 1e-7
            if structure in ("full", "low_rank"):
                assert error(found.curvature.dense(), expected) < 1e-7
            if structure == "kronecker":
                assert found.fallbacks[layout.names[0]] == "no matrix product (norm, embedding or convolution)"


# -- cells --------------------------------------------------------------------------------------------------------
