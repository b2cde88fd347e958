from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.members.compat import transformers as compat
from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from tests.members.reference import core_of, prepared
from tests.members.subjects import SUBJECTS, labelled
from tests.models.prepared import unchanged
from tests.tiny_models import switch_on_checkpointing, tiny_llama, with_lora


@pytest.mark.parametrize("name", ["llama-lora", "llama-lora-last-block", "gpt2-last-block", "bert-last-block"])
@pytest.mark.parametrize("enabled", ["before attach", "after attach"])
def test_activation_checkpointing_changes_no_gradient(name: str, enabled: str) -> None:
    model, _, theta = prepared(name, torch.float64)
    inputs = labelled(name)
    core = core_of(model)

    def gradients(bayesian: BayesianModel) -> Tensor:
        leaves = [theta.clone().requires_grad_() for _ in range(2)]
        # two forwards, then two backwards: each block must be recomputed with the members of its own first run
        losses = [bayesian.train()(**inputs, theta=leaf * (1 + i)).loss.sum() for i, leaf in enumerate(leaves)]
        (losses[0] + losses[1]).backward()
        return torch.stack([leaf.grad for leaf in leaves])

    with attach(model, theta, subspace=SUBJECTS[name].subspace) as bayesian:
        expected = gradients(bayesian)
    if enabled == "before attach":
        switch_on_checkpointing(core)
    with attach(model, theta, subspace=SUBJECTS[name].subspace) as bayesian:
        if enabled == "after attach":
            switch_on_checkpointing(bayesian)
        runs = count_norms(core)
        found = gradients(bayesian)
    assert max(runs.values()) == 4  # two forwards, and two more runs in the backward
    assert torch.equal(found, expected)


def test_a_checkpointed_graph_has_two_backward_passes() -> None:
    model, _, theta = prepared("llama-lora", torch.float64)
    gradients = []
    for checkpointed in (False, True):
        leaf = theta.clone().requires_grad_()
        with attach(model, theta) as bayesian:
            if checkpointed:
                switch_on_checkpointing(bayesian)
            first, *others = bayesian.train()(**labelled("llama-lora"), theta=leaf).loss
            first.backward(retain_graph=True)
            sum(others).backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def count_norms(core: nn.Module) -> dict[str, int]:
    """Count the calls of each norm from now on; every block has norms."""
    counts: dict[str, int] = {}
    for path, module in core.named_modules():
        if type(module).__name__.endswith("Norm"):
            module.register_forward_hook(lambda *_, path=path: counts.__setitem__(path, counts.get(path, 0) + 1))
    return counts


def test_reentrant_checkpointing_is_refused() -> None:
    with attach(with_lora(tiny_llama())) as bayesian:
        for before in (False, True):  # what was refused is not on afterwards
            if before:
                switch_on_checkpointing(bayesian)
            states = [compat.checkpointing_state(module) for module in compat.checkpointing_modules(bayesian.core)]
            with pytest.raises(ValueError, match="use_reentrant=False"):
                switch_on_checkpointing(bayesian, {"use_reentrant": True})
            again = [compat.checkpointing_state(module) for module in compat.checkpointing_modules(bayesian.core)]
            assert again == states
            assert any(map(compat.is_checkpointing, compat.checkpointing_modules(bayesian.core))) == before


def test_a_model_that_checkpoints_reentrantly_is_left_alone() -> None:
    model = with_lora(tiny_llama())
    switch_on_checkpointing(core_of(model), {"use_reentrant": True})
    for _ in range(2):
        with unchanged(model), pytest.raises(ValueError, match="use_reentrant=False"):
            attach(model)
