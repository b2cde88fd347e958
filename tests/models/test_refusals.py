from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
import torch

from hf_bayes.models.attaching import attach
from hf_bayes.models.refusals import COMPILE_LAYERS
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
        with pytest.raises(ValueError, match=r"cannot be compiled as a whole: .* layer.compile\(\)"):
            compiled(**batch())
        bayesian(**batch())


@pytest.mark.parametrize("name", ["llama-lora", "llama-last-block"])
def test_the_line_that_is_advised_finds_the_layers(name: str) -> None:
    model, _, theta, subspace = prepared(name)
    layers = COMPILE_LAYERS.removeprefix("for layer in ").removesuffix(": layer.compile()")
    with attach(model, theta, subspace=subspace) as bayesian:
        assert attrgetter(layers.removeprefix("model."))(bayesian) is core_of(model).model.layers


@pytest.mark.parametrize("name", ["llama-lora", "llama-last-block"])
def test_layers_compiled_one_by_one_change_nothing(name: str) -> None:
    found = []
    for backend in (None, "aot_eager"):
        model, _, theta, subspace = prepared(name)
        leaf = theta.clone().requires_grad_()
        with attach(model, theta, subspace=subspace) as bayesian:
            for layer in core_of(model).model.layers if backend else ():
                layer.compile(backend=backend)
            bayesian.train()(**labelled(name), theta=leaf).loss.sum().backward()
            with torch.no_grad():
                found.append((leaf.grad, bayesian.eval()(**batch()).logits))
    # the operations are the same, but a compiler may order sums anew: rounding of float32 norms, see TOLERANCE
    for eager, compiled in zip(*found, strict=True):
        assert relative_error(compiled, eager) < TOLERANCE
