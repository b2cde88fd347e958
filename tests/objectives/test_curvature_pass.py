"""Every combination of estimator x structure x subspace x likelihood against its definition."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    DebertaV2ForSequenceClassification,
    MPNetForSequenceClassification,
    XLNetForSequenceClassification,
)

from hf_bayes.core.rng import generator
from hf_bayes.methods.laplace.estimators import ESTIMATORS
from hf_bayes.methods.laplace.kronecker import KroneckerSum
from hf_bayes.methods.laplace.supported import STRUCTURES, CurvatureSpec, table
from hf_bayes.models.attaching import attach
from hf_bayes.objectives.curvature_pass import CurvaturePassResult, run_curvature_pass
from tests import tiny_models as models
from tests.methods.laplace import brute_force
from tests.methods.laplace.brute_force import Problem, Row, problem

PROBLEMS = [
    (family, part, task)
    for family, task in (
        ("gpt2", "lm"),
        ("llama", "lm"),
        ("gpt2", "classes"),  # decoders: every token is scored, the last one read
        ("llama", "classes"),
        ("bert", "classes"),
        ("bert", "regression"),
        ("bert", "tokens"),
    )
    for part in ("lora", "head", "block")
]
problems = pytest.mark.parametrize(("family", "part", "task"), PROBLEMS, ids=["-".join(p) for p in PROBLEMS])
TOLERANCE = {"llama": 1e-5}
"""Relative to the largest entry. Llama-like models compute norms in float32; the others are float64 throughout."""

_CACHE: dict[Any, tuple[Problem, list[Row]]] = {}


def evaluated(family: str, part: str, task: str) -> tuple[Problem, list[Row]]:
    key = (family, part, task)
    if key not in _CACHE:
        made = problem(*key)
        _CACHE[key] = (made, brute_force.evaluate_rows(made))
    return _CACHE[key]


def run(made: Problem, *, batch: int = 3, **changes: Any) -> CurvaturePassResult:
    options = {k: changes.pop(k) for k in ("scale", "gradient", "seed") if k in changes}
    noise = brute_force.NOISE if made.task == "regression" else None
    with attach(made.model, subspace=made.subspace, noise_std=noise) as model:
        theta, spec = model.theta[0].detach(), CurvatureSpec(**changes)
        return run_curvature_pass(model, theta, made.batches(batch), len(made.rows), spec, **options)


def cotangents(made: Problem, rows: list[Row], estimator: str, samples: int | None) -> list[list[Tensor]]:
    streams = brute_force.uniform_streams(rows, lambda s, row: generator(0, "labels", s, row), samples or 0)
    return brute_force.cotangents(made, rows, estimator, samples, streams)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


CELLS = [("ggn", None), ("ggn", 2), ("ef_sequence", 1), ("ef_token", None), ("ef_token", 2)]


@problems
@pytest.mark.parametrize(("estimator", "samples"), CELLS)
def test_full_diagonal_and_low_rank_are_those_of_brute_force(
    family: str, part: str, task: str, estimator: str, samples: int | None
) -> None:
    made, rows = evaluated(family, part, task)
    expected = brute_force.outer(rows, cotangents(made, rows, estimator, samples))
    tolerance = TOLERANCE.get(family, 1e-7)
    for structure in ("full", "diagonal", "low_rank"):
        found = run(made, estimator=estimator, num_samples=samples, structure=structure, rank=400)
        wanted = torch.diag(expected.diagonal()) if structure == "diagonal" else expected
        assert error(found.curvature.dense(), wanted) < tolerance, structure
    assert found.log_lik == pytest.approx(brute_force.log_lik(made, rows), rel=tolerance)
    assert (found.num_rows, found.num_terms) == (len(rows), sum(len(row.labels) for row in rows))
    slope = sum(
        torch.einsum("tcd,tc->d", row.jacobian, brute_force.score(made, row.logits, row.labels)) for row in rows
    )
    assert found.gradient is not None
    assert error(found.gradient.mean, torch.as_tensor(slope)) < tolerance


@problems
@pytest.mark.parametrize("rank", [3, 8])
def test_a_low_rank_keeps_the_largest_directions(family: str, part: str, task: str, rank: int) -> None:
    made, rows = evaluated(family, part, task)
    values, vectors = torch.linalg.eigh(brute_force.outer(rows, cotangents(made, rows, "ef_token", None)))
    expected = vectors[:, -rank:] * values[-rank:] @ vectors[:, -rank:].T  # at most nine terms: the sketch has them all
    found = run(made, estimator="ef_token", num_samples=None, structure="low_rank", rank=rank, gradient=False)
    assert found.curvature.columns.shape[1] <= rank  # type: ignore[attr-defined]
    assert error(found.curvature.dense(), expected) < TOLERANCE.get(family, 1e-7)


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


SHARED = [(structure, "expand") for structure in STRUCTURES]
SHARED += [(structure, "reduce") for structure in STRUCTURES if structure.startswith("kronecker")]


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


def test_random_signs_and_labels_average_to_the_exact_curvature() -> None:
    made, _ = evaluated("gpt2", "head", "lm")
    for estimator in ("ef_token", "ggn"):
        exact = run(made, estimator=estimator, num_samples=None, structure="full", gradient=False).curvature.dense()
        mean = run(made, estimator=estimator, num_samples=400, structure="full", gradient=False).curvature.dense()
        # an outer product differs from its mean about as much as its mean is large; 3 rows x 400 draws
        assert float((mean - exact).norm() / exact.norm()) < 4 / (3 * 400) ** 0.5
        other = run(made, estimator="ef_sequence", structure="full", gradient=False).curvature.dense()
        assert float((other - exact).norm() / exact.norm()) > 4 / (3 * 400) ** 0.5  # the broken twin


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
        size = len(block) if isinstance(block, Tensor) else block.eigenvalues.numel()
        own = moments[start : start + size, start : start + size]
        start += size
        if own.abs().max() < 1e-20:  # the bias of BERT's keys does nothing
            continue
        if isinstance(block, Tensor):
            assert error(block, own.diagonal()) < tolerance
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


def test_a_tied_head_is_one_tensor_and_kept_diagonally_by_kfac() -> None:
    made = problem("gpt2", "head", "lm")
    made.model.transformer.wte.weight = made.model.lm_head.weight  # type: ignore[union-attr]
    made.head = torch.nn.Identity()
    made.subspace = "wte"
    rows = brute_force.evaluate_rows(Problem(made.model, made.subspace, "lm", made.rows, made.model.lm_head))  # type: ignore[arg-type]
    expected = brute_force.outer(rows, cotangents(made, rows, "ggn", 2))
    assert error(run(made, structure="full", num_samples=2).curvature.dense(), expected) < 1e-7
    for structure in ("diagonal", "kronecker"):
        found = run(made, structure=structure, num_samples=2)
        assert error(found.curvature.dense(), torch.diag(expected.diagonal())) < 1e-7
    assert found.fallbacks == {"transformer.wte.weight": "tied: two modules own it"}


def test_a_module_called_twice_is_summed_or_refused() -> None:
    made, rows = evaluated("bert", "block", "classes")
    made = Problem(copy.deepcopy(made.model), "layer.1.attention.self.query", "classes", made.rows, made.head)
    layers = made.model.bert.encoder.layer  # type: ignore[union-attr]
    layers[0].attention.self.query = layers[1].attention.self.query
    made.subspace = "layer.0.attention.self.query"
    made.head = made.model.classifier  # type: ignore[assignment]
    rows = brute_force.evaluate_rows(made)
    expected = brute_force.outer(rows, cotangents(made, rows, "ggn", 2))
    for structure in ("full", "low_rank"):
        assert error(run(made, structure=structure, num_samples=2).curvature.dense(), expected) < 1e-7
    for structure in ("diagonal", "kronecker"):
        with pytest.raises(ValueError, match="is called more than once in a forward pass"):
            run(made, structure=structure, num_samples=2)


OTHERS = {
    "xlnet": (XLNetForSequenceClassification, {"d_model": 8, "n_head": 2, "d_inner": 8}, "ff.layer_1"),  # time first
    "deberta-v2": (DebertaV2ForSequenceClassification, {"hidden_size": 8, "num_attention_heads": 2,
                   "intermediate_size": 8, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                   "share_att_key": True, "position_buckets": 4, "max_position_embeddings": 16}, "lora"),
    "mpnet": (MPNetForSequenceClassification, {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8,
              "max_position_embeddings": 16}, "."),
}  # fmt: skip


@pytest.mark.parametrize("rows", [2, 5])  # as many as positions, too
@pytest.mark.parametrize("family", OTHERS)
def test_modules_whose_rows_are_not_the_batchs_are_refused(family: str, rows: int) -> None:
    kind, fields, subspace = OTHERS[family]
    model: Any = kind(kind.config_class(vocab_size=20, num_hidden_layers=1, **fields)).eval()
    if subspace == "lora":
        model, subspace = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2)), "lora_"
    ids = torch.randint(3, 20, (rows, 5))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(rows, dtype=torch.int64)}
    with (
        attach(model, subspace=subspace) as bayesian,
        pytest.raises(ValueError, match=r"its module was called with \d rows, expected \d: .*leave it out of"),
    ):
        run_curvature_pass(bayesian, bayesian.theta[0].detach(), lambda numbers: [batch], rows, CurvatureSpec())


def test_a_parameter_that_no_forward_reads_is_refused() -> None:
    made = problem("bert", "block", "classes")
    made.model.register_module("idle", torch.nn.Linear(2, 2).double())
    made.subspace = "idle|classifier"
    with pytest.raises(ValueError, match=r"2 random parameters were not read in a forward pass, first idle\.weight"):
        run(made)


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


def test_the_pass_disables_dropout_and_restores_the_model() -> None:
    without = run(evaluated("gpt2", "lora", "lm")[0], num_samples=2)
    made = problem("gpt2", "lora", "lm")
    for module in made.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    with attach(made.model, subspace=made.subspace) as model:
        model.train()
        theta = model.theta[0].detach()
        before = {name: (value.clone(), value.requires_grad) for name, value in made.model.named_parameters()}
        forwards = [vars(module).get("forward") for module in made.model.modules()]
        spec = CurvatureSpec(num_samples=2)
        found = [run_curvature_pass(model, theta + shift, made.batches(3), 3, spec) for shift in (0, 0, 1)]
        assert all(module.training for module in made.model.modules())
        assert [vars(module).get("forward") for module in made.model.modules()] == forwards
        for name, value in made.model.named_parameters():
            assert torch.equal(value, before[name][0])
            assert value.requires_grad == before[name][1]
            assert value.grad is None
    assert torch.equal(found[0].curvature.dense(), found[1].curvature.dense())
    assert error(found[0].curvature.dense(), without.curvature.dense()) < 1e-12
    assert error(found[2].curvature.dense(), without.curvature.dense()) > 0.01  # theta counts, not the model's weights


@pytest.mark.parametrize("part", ["lora", "block"])
def test_activation_checkpointing_changes_nothing_and_recomputes(part: str) -> None:
    made = problem("llama", part, "lm")
    blocks = made.model.get_submodule("base_model.model.model.layers" if part == "lora" else "model.layers")
    calls = []
    handle = blocks[1].self_attn.register_forward_hook(lambda *args: calls.append(1))  # type: ignore[index,union-attr]
    found = []
    for checkpointing in (False, True):
        with attach(made.model, subspace=made.subspace) as model:
            if checkpointing:
                models.switch_on_checkpointing(model)
            calls.clear()
            spec = CurvatureSpec(structure="kronecker")
            found.append(run_curvature_pass(model, model.theta[0].detach(), made.batches(3), 3, spec))
            runs = len(calls)
        assert runs == (3 if checkpointing else 1)  # once forward, once for each of two backward passes
    handle.remove()
    assert error(found[1].curvature.dense(), found[0].curvature.dense()) < 1e-12


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


# -- combinations -------------------------------------------------------------------------------------------------


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
    page = (Path(__file__).parents[2] / "docs" / "laplace.md").read_text(encoding="utf-8")
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
    monkeypatch.setattr(Problem, "batches", lambda *args: lambda numbers: pytest.fail("rows were asked for"))
    with pytest.raises(ValueError, match=message):
        run(made, **changes)
