from __future__ import annotations

import pytest
import torch

from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.models.attaching import attach
from hf_bayes.objectives.curvature_pass import run_curvature_pass
from tests import tiny_models as models
from tests.methods.laplace.brute_force import problem
from tests.objectives.curvature_problems import error, evaluated, run


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
