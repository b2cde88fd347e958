from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    DebertaV2ForSequenceClassification,
    MPNetForSequenceClassification,
    XLNetForSequenceClassification,
)

from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.models.attaching import attach
from hf_bayes.objectives.curvature_pass import run_curvature_pass
from tests.methods.laplace import brute_force
from tests.methods.laplace.brute_force import Problem, problem
from tests.objectives.curvature_problems import cotangents, error, evaluated, run


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


def test_a_module_may_be_called_by_keyword() -> None:
    expected = run(problem("bert", "head", "classes")).curvature.dense()
    made = problem("bert", "head", "classes")
    with made.head.register_forward_pre_hook(lambda _, args, kwargs: ((), {"input": args[0]}), with_kwargs=True):
        found = run(made).curvature.dense()
    assert torch.equal(found, expected)


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
