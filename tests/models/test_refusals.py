from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn

from hf_bayes.models.attaching import attach
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from hf_bayes.models.refusals import compiling_blocks
from tests.members.reference import core_of, relative_error
from tests.members.subjects import labelled
from tests.models.prepared import TOLERANCE, prepared
from tests.tiny_models import batch, tiny_llama


def test_hidden_states_of_a_mixture_are_refused() -> None:
    with (
        attach(tiny_llama(), subspace="last_block") as bayesian,
        pytest.raises(ValueError, match="from member to member"),
    ):
        bayesian(**batch(), output_hidden_states=True)


def test_a_bayesian_model_is_not_saved_as_a_plain_one(tmp_path: Any) -> None:
    with (
        attach(tiny_llama(), subspace="last_block") as bayesian,
        pytest.raises(ValueError, match="saved as a posterior"),
    ):
        bayesian.save_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["llama-lora", "bert-head"])
def test_compiling_the_whole_is_refused_in_words(name: str) -> None:
    model, _, theta, subspace = prepared(name)
    with attach(model, theta, subspace=subspace) as bayesian, torch.no_grad():
        compiled = torch.compile(bayesian, backend="eager")
        with pytest.raises(ValueError, match=r"cannot be compiled as a whole: .* block.compile\(\)"):
            compiled(**batch())
        bayesian(**batch())


BLOCKS = {"llama-lora": "model.layers", "llama-last-block": "model.layers", "bert-head": "bert.encoder.layer"}
"""The name of a model in ``SUBJECTS`` -> the path of its blocks."""


@pytest.mark.parametrize("name", BLOCKS)
def test_the_line_that_is_advised_finds_the_blocks(name: str) -> None:
    model, _, theta, subspace = prepared(name)
    with attach(model, theta, subspace=subspace) as bayesian:
        line = compiling_blocks(bayesian.core, "model.core")
        assert line == f"for block in model.core.{BLOCKS[name]}: block.compile()"
        found: list[nn.Module] = []
        exec(line.replace("block.compile()", "found.append(block)"), {"model": bayesian, "found": found})
        assert found == list(attrgetter(BLOCKS[name])(core_of(model)))


def test_a_model_without_blocks_gets_advice_without_a_path() -> None:
    assert compiling_blocks(nn.Linear(2, 2), "model") == "block.compile() for each block of model"


@pytest.mark.parametrize("name", BLOCKS)
def test_layers_compiled_one_by_one_change_nothing(name: str) -> None:
    found = []
    for backend in (None, "aot_eager"):
        model, _, theta, subspace = prepared(name)
        leaf = theta.clone().requires_grad_()
        with attach(model, theta, subspace=subspace) as bayesian:
            for layer in attrgetter(BLOCKS[name])(core_of(model)) if backend else ():
                layer.compile(backend=backend)
            bayesian.train()(**labelled(name), theta=leaf).loss.sum().backward()
            with torch.no_grad():
                found.append((leaf.grad, bayesian.eval()(**batch()).logits))
    # the operations are the same, but a compiler may order sums anew: rounding of float32 norms, see TOLERANCE
    for eager, compiled in zip(*found, strict=True):
        assert relative_error(compiled, eager) < TOLERANCE


@pytest.mark.parametrize("name", ["attn_implementation", "num_labels"])
def test_a_setting_of_the_base_model_belongs_there(name: str) -> None:
    words = rf"no argument {name}: .* give base_model=AutoModelForSequenceClassification.from_pretrained\(name, {name}="
    with pytest.raises(TypeError, match=words):
        BayesianModelForSequenceClassification.from_pretrained("anywhere", **{name: 2})


def test_the_former_name_of_dtype_is_not_taken() -> None:
    with pytest.raises(TypeError, match=r"no argument torch_dtype: give dtype="):
        BayesianModelForSequenceClassification.from_pretrained("anywhere", torch_dtype=torch.bfloat16)
