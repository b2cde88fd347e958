"""The gradient and the log-likelihoods that a rule or a kernel receives from ``BayesianTrainer``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from hf_bayes.core.types import Evaluate, Evaluation, Kernel
from hf_bayes.distributions.approximations import Draws
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.objectives import starting
from tests import runs
from tests.tiny_models import CHECKPOINTING, tiny_gpt2, tiny_llama, with_lora
from tests.training.trained import Still, full_data, relative

VARIANTS = {
    "one member at a time": {"members_per_pass": 1},
    "two members at a time": {"members_per_pass": 2},
    "accumulation": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "activation checkpointing": {CHECKPOINTING: True},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize("minibatch", ["independent", "shared"])
@pytest.mark.parametrize("subspace", ["all layers", "trunk"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_gradient_of_a_chain_is_equal_in_every_variant(tmp_path, evaluations, minibatch, subspace, variant):
    adapter = {"layers_to_transform": [1]} if subspace == "trunk" else {}

    def gradient(**changes: Any) -> Tensor:
        evaluations.clear()
        fields = {"per_device_train_batch_size": 4, "members_per_pass": 3, **changes}
        trainer = runs.trainer(
            tmp_path,
            SGHMCConfig(num_chains=3),
            model=with_lora(tiny_llama(), **adapter),
            max_steps=1,
            minibatch=minibatch,
            **fields,
        )
        assert (trainer.bayesian.members.num_trunk_blocks > 0) == (subspace == "trunk")
        trainer.train()
        return evaluations[0].grad_log_lik

    # bf16 has 8 bits; else rounding of float32 sums in another order
    tolerance = 0.05 if variant == "bf16" else 2e-6
    assert relative(gradient(**VARIANTS[variant]), gradient()) < tolerance


def test_gradient_is_what_a_plain_model_gives_for_every_chain(tmp_path, evaluations):
    for build in (lambda: with_lora(tiny_llama()), lambda: with_lora(tiny_gpt2())):
        evaluations.clear()
        rows = runs.token_rows(4, length=6)
        trainer = runs.trainer(
            tmp_path, SGHMCConfig(num_chains=3), model=build(), train=rows, max_steps=1, per_device_train_batch_size=4
        )
        trainer.train()
        assert relative(evaluations[0].grad_log_lik, full_data(build, trainer, rows).grad_log_lik) < 2e-6


def test_packed_shared_rows_have_the_energy_of_padded_ones(tmp_path, evaluations):
    rows, method = runs.token_rows([5, 9, 3, 12]), SGHMCConfig(num_chains=2)
    fields = {"max_steps": 1, "per_device_train_batch_size": 4, "minibatch": "shared"}
    runs.trainer(tmp_path, method, train=rows, collator=runs.padding_collator(), **fields).train()
    bare = [{name: row[name] for name in ("input_ids", "labels")} for row in rows]
    runs.trainer(tmp_path, method, train=bare, collator=DataCollatorWithFlattening(), **fields).train()
    padded, packed = evaluations
    # rounding of float32 sums in another order
    assert relative(packed.log_lik, padded.log_lik) < 1e-6
    assert relative(packed.grad_log_lik, padded.grad_log_lik) < 1e-5


def test_kernel_log_likelihoods_keep_float64_digits(tmp_path, monkeypatch):
    seen: list[Tensor] = []

    def step(state: Still, evaluate: Evaluate, rngs: Any) -> tuple[Still, dict]:
        for batches in (None, *(slice(k, k + 1) for k in range(4))):
            seen.append(evaluate(state.theta, gradient=False, batches=batches).log_lik)
        return state, {}

    kernel = Kernel(
        init=lambda theta, evaluate, rngs: Still(theta, torch.zeros(len(theta), dtype=torch.int64)),
        step=step,
        finish=lambda state, draws: Draws.from_chains(draws),
    )
    monkeypatch.setattr(starting, "assemble", lambda config, problem: kernel)
    fields = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "minibatch": "shared"}
    runs.trainer(tmp_path, HMCConfig(num_chains=2), train=runs.token_rows(8), max_steps=1, **fields).train()
    whole, *parts = seen
    assert relative(torch.stack(parts).mean(0), whole) < 1e-14  # float32 sums are off by up to 6e-8


@pytest.mark.parametrize("minibatch", ["independent", "shared"])
def test_a_kernel_is_told_of_each_batch_on_the_scale_of_all_data(tmp_path, minibatch, monkeypatch):
    told: list[Evaluation] = []

    def step(state: Still, evaluate: Evaluate, rngs: Any) -> tuple[Still, dict]:
        told.extend([evaluate(state.theta), evaluate(state.theta, batches=slice(1, 3))])
        return state, {}

    kernel = Kernel(
        lambda theta, evaluate, rngs: Still(theta, torch.zeros(2, dtype=torch.int64)),
        step,
        lambda state, draws: Draws.from_chains(draws),
    )
    monkeypatch.setattr(starting, "assemble", lambda config, problem: kernel)
    rows = runs.token_rows([8, 3, 8, 5, 8, 8, 4, 8, 8])
    model = with_lora(tiny_llama(dtype=torch.float64))
    settings = {"minibatch": minibatch, "collator": runs.padding_collator(), "max_steps": 1}
    trainer = runs.trainer(
        tmp_path, SGHMCConfig(num_chains=2), model=model, train=rows, gradient_accumulation_steps=4, **settings
    )
    loader = list(itertools.islice(trainer.get_train_dataloader(), 4))
    trainer.train()
    every, some = told
    theta = trainer.run.state.theta
    for place, batch in enumerate(loader):
        copies = {k: torch.cat([v, v]) for k, v in batch.items()} if minibatch == "shared" else batch
        expected = -9 / 2 * trainer.bayesian(**copies, theta=theta, folded=True).loss  # 9 rows, 2 in a batch
        torch.testing.assert_close(every.batch_log_lik[:, place], expected.detach(), rtol=1e-6, atol=0)  # float32 loss
    torch.testing.assert_close(every.log_lik, every.batch_log_lik.mean(1).to(theta.dtype))
    assert torch.equal(some.batch_log_lik, every.batch_log_lik[:, 1:3])
    torch.testing.assert_close(some.log_lik, some.batch_log_lik.mean(1).to(theta.dtype))
    assert (some.grad_log_lik - every.grad_log_lik).norm() > 0.1 * every.grad_log_lik.norm()
