from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from huggingface_hub import HfApi, RepoUrl
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    DataCollatorWithFlattening,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from hf_bayes import Posterior
from hf_bayes.core.types import Evaluate, Evaluation, Kernel, Rule, locate_at_theta
from hf_bayes.distributions.approximations import Draws
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.registry import METHODS
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.objectives import starting
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.training.compat import TrainerHost
from hf_bayes.training.map_comparison import compare, map_of_run
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs
from tests.tiny_models import CHECKPOINTING, tiny_bert, tiny_gpt2, tiny_llama, with_lora

# -- the gradient that a rule receives -------------------------------------------------------------------------------


class Still(NamedTuple):
    theta: Tensor
    step: Tensor


@pytest.fixture
def evaluations(monkeypatch) -> list[Evaluation]:
    """What the trainer hands to its rule, which never moves."""
    seen: list[Evaluation] = []

    def update(state: Still, evaluation: Evaluation, lr: float, rngs: Any) -> tuple[Still, dict]:
        seen.append(Evaluation(evaluation.log_lik.clone(), evaluation.grad_log_lik.clone()))
        return state, {}

    rule = Rule(
        init=lambda theta, rngs: Still(theta, torch.zeros(len(theta), dtype=torch.int64)),
        locate=locate_at_theta,
        update=update,
        finish=lambda state, draws: Draws.from_chains(draws),
    )
    monkeypatch.setattr(starting, "build", lambda config, problem: rule)
    return seen


def full_data(build: Any, trainer: BayesianTrainer, rows: list[dict]) -> Evaluation:
    """Log-likelihood of all rows and its gradient for every chain, by a plain model for each."""
    layout, values, grads = trainer.bayesian.layout, [], []
    for theta in trainer.setup.origin:
        model = build()
        parameters = dict(model.named_parameters())
        for name, value in layout.unflatten(theta).items():
            parameters[name].data.copy_(value)
        total = torch.zeros((), dtype=theta.dtype)
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            logits = model(input_ids=ids).logits[0, :-1]
            total = total + logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).sum()
        found = torch.autograd.grad(total, [parameters[name] for name in layout.names])
        values.append(total.detach())
        grads.append(layout.flatten(dict(zip(layout.names, found, strict=True))))
    return Evaluation(torch.stack(values), torch.stack(grads))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def mean_of(evaluations: list[Evaluation]) -> Evaluation:
    return Evaluation(*(torch.stack([evaluation[i] for evaluation in evaluations]).mean(0) for i in (0, 1)))


UNEQUAL = [8, 128, 8, 128, 8, 8, 128, 128]


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (4, 1), (1, 4), (4, 2)])
def test_mean_gradient_over_all_batches_is_the_full_gradient(tmp_path, evaluations, batch, accumulation):
    def build() -> Any:
        return with_lora(tiny_llama(dtype=torch.float64))

    rows = runs.token_rows(UNEQUAL)
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        model=build(),
        train=rows,
        collator=runs.padding_collator(),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=len(rows) // (batch * accumulation),
    )
    trainer.train()
    found, expected = mean_of(evaluations), full_data(build, trainer, rows)
    # transformers' RMSNorm and rotary embedding compute in float32
    assert relative(found.log_lik, expected.log_lik) < 1e-6
    assert relative(found.grad_log_lik, expected.grad_log_lik) < 1e-6


@pytest.mark.parametrize("batch", [1, 4])
def test_normalising_by_the_terms_of_the_update_is_caught(tmp_path, evaluations, monkeypatch, batch):
    """The twin: transformers' sum of losses over sum of tokens, times N."""
    monkeypatch.setattr(DataScale, "factor", lambda self, terms: self.num_data / float(terms[0]))

    def build() -> Any:
        return with_lora(tiny_llama())

    rows = runs.token_rows([8, 128, 8, 128, 8, 8, 8, 128])  # 3 long ones: no two batches of 4 are alike
    settings = {"per_device_train_batch_size": batch, "max_steps": len(rows) // batch}
    trainer = runs.trainer(
        tmp_path, SGHMCConfig(num_chains=1), train=rows, collator=runs.padding_collator(), model=build(), **settings
    )
    trainer.train()
    assert relative(mean_of(evaluations).grad_log_lik, full_data(build, trainer, rows).grad_log_lik) > 0.02


def test_num_data_and_data_unit_scale_the_likelihood(tmp_path, evaluations):
    rows, found = runs.token_rows(8, length=5), {}
    for name, changes in {"token": {}, "sequence": {"data_unit": "sequence"}, "given": {"num_data": 64.0}}.items():
        evaluations.clear()
        trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=1), train=rows, max_steps=1, **changes)
        trainer.train()
        found[name] = trainer.num_data, float(evaluations[0].log_lik)
    assert [value[0] for value in found.values()] == [32.0, 8.0, 64.0]
    assert found["sequence"][1] == pytest.approx(found["token"][1] / 4)
    assert found["given"][1] == pytest.approx(found["token"][1] * 2)


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
    monkeypatch.setattr(starting, "build", lambda config, problem: kernel)
    fields = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "minibatch": "shared"}
    runs.trainer(tmp_path, HMCConfig(num_chains=2), train=runs.token_rows(8), max_steps=1, **fields).train()
    whole, *parts = seen
    assert relative(torch.stack(parts).mean(0), whole) < 1e-14  # float32 sums are off by up to 6e-8


# -- chains ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [False, True])
def test_draws_of_a_chain_do_not_depend_on_the_other_chains(tmp_path, dropout):
    def draws(num_chains: int, **changes: Any) -> Tensor:
        model = tiny_gpt2(**dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1 * dropout))
        trainer = runs.trainer(
            tmp_path,
            SGHMCConfig(num_chains=num_chains, draws_per_chain=2),
            model=with_lora(model, lora_dropout=0.1 * dropout),
            gradient_accumulation_steps=2,
            **changes,
        )
        trainer.train()
        return trainer.posterior.approximation.theta.view(num_chains, 2, -1)

    four = draws(4, members_per_pass=1)
    assert torch.equal(draws(2, members_per_pass=1), four[:2])
    assert torch.equal(draws(1), four[:1])
    if not dropout:  # folded members share one stream of dropout masks, and round in another order
        assert relative(draws(4), four) < 1e-5


@pytest.mark.parametrize("changes", [{"num_chains": 3}, {"num_chains": 3, "prior_mean": "initial"}])
def test_chains_start_in_different_places_around_the_model(tmp_path, changes):
    trainer = runs.trainer(tmp_path, SGHMCConfig(init_jitter=0.1, **changes))
    distance = (trainer.setup.origin - trainer.setup.start).norm(dim=1) / trainer.setup.start.norm()
    assert ((distance > 0.05) & (distance < 0.2)).all()
    assert all(not torch.equal(a, b) for a, b in pairwise(trainer.setup.origin))


def test_workers_of_the_data_loader_change_nothing(tmp_path):
    def posterior(workers: int) -> Any:
        trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), max_steps=3, dataloader_num_workers=workers)
        trainer.train()
        return trainer.posterior.approximation

    assert runs.equal(posterior(0), posterior(1))


def test_an_order_of_rows_that_chains_do_not_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match="train_sampling_strategy='group_by_length' is refused, expected 'random'"):
        runs.trainer(tmp_path, SGHMCConfig(), train_sampling_strategy="group_by_length")


@pytest.mark.parametrize("stream", [False, True])
def test_workers_fetch_as_far_ahead_as_they_are_told(tmp_path, stream):
    rows = runs.token_rows(6)
    changes = {"train": Stream(rows), "minibatch": "shared", "num_data": 7.0} if stream else {"train": rows}
    trainer = runs.trainer(tmp_path, SGHMCConfig(), dataloader_num_workers=1, dataloader_prefetch_factor=3, **changes)
    loader = trainer.get_train_dataloader()
    assert (loader.dataset.loader if stream else loader).prefetch_factor == 3


@pytest.mark.parametrize("data", ["list", "torch", "datasets"])
def test_any_sized_data_set_can_be_trained_on(tmp_path, data):
    rows = [{**row, "comment": "not for the model"} for row in runs.token_rows(6)]

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> dict:
            return rows[index]

    train = {"list": tuple(rows), "torch": Rows(), "datasets": Dataset.from_list(rows)}[data]
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), train=train, max_steps=2)
    trainer.train()
    assert trainer.num_data == 6 * 7


# -- the run ---------------------------------------------------------------------------------------------------------

SAMPLER = {"num_chains": 2, "draws_per_chain": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "map": {"num_chains": 1},
    "ensemble": {"num_chains": 3},
    "mean_field": {"num_chains": 2},
    "hmc": {**SAMPLER, "num_leapfrog": 2},
    "laplace": {"num_chains": 2},
    "penalty": {**SAMPLER, "num_leapfrog": 1},
    "swa": {"num_chains": 2},
    "swag": {"num_chains": 2},
    "mc_dropout": {"num_chains": 2, "num_masks": 1},
}


@pytest.mark.parametrize("name", METHODS, ids=str)
@pytest.mark.parametrize("warm_start_steps", [0, 2])
def test_every_method_trains_a_causal_lm_to_a_posterior(tmp_path, name, warm_start_steps):
    config = METHODS[name](**SETTINGS.get(name, SAMPLER), warm_start_steps=warm_start_steps)
    batches = {"gradient_accumulation_steps": config.requirements.min_batches}
    trainer = runs.trainer(tmp_path, config, eval_dataset=runs.token_rows(4, seed=1), **batches)
    output = trainer.train()
    posterior = trainer.posterior
    members = posterior.sample(None)
    assert output.global_step == 6
    assert members.isfinite().all()
    if name not in ("metropolis", "hmc", "penalty", "gps"):  # these may have refused all six moves
        assert (members - trainer.setup.start).abs().max() > 0
    expected = config.num_chains * config.draws_per_chain
    assert posterior.config.num_members == (0 if name in ("mean_field", "laplace", "swag") else expected)
    metrics = trainer.evaluate()
    assert 0 < metrics["eval_nll"] < 20
    trainer.save_model()
    kept = trainer.posterior.config.metrics
    assert kept["nll"] == metrics["eval_nll"]
    assert math.isfinite(kept["map_nll"])


@pytest.mark.parametrize("head", ["classification", "multi_label", "regression"])
def test_classifiers_and_regressors_train(tmp_path, head):
    rows, changes = runs.label_rows(8), {}
    model = tiny_bert()
    if head == "regression":
        model, changes = tiny_bert(num_labels=1), {"noise_std": 0.5}
        rows = [{**row, "label": float(row["label"])} for row in rows]
    if head == "multi_label":
        model.config.problem_type = "multi_label_classification"
        rows = [
            {**{k: v for k, v in row.items() if k != "label"}, "labels": [1.0, 0.0, float(row["label"])]}
            for row in rows
        ]
        rows = [{**row, "labels": [min(1.0, x) for x in row["labels"]]} for row in rows]
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        model=model,
        subspace="last_layer",
        train=rows,
        eval_dataset=rows,
        **changes,
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert trainer.num_data == 8
    assert math.isfinite(metrics["eval_nll"])
    assert metrics["eval_member_nll"] >= metrics["eval_nll"]  # Jensen
    assert metrics["eval_loss"] == metrics["eval_nll"]


def test_integer_labels_of_a_regressor_are_no_classes(tmp_path):
    rows = runs.label_rows(8)  # 0, 1 and 2 where num_labels is 1
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=1),
        model=tiny_bert(num_labels=1),
        subspace="last_layer",
        train=rows,
        noise_std=1.0,
    )
    trainer.train()


def test_logs_tell_of_every_chain(tmp_path):
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=3), max_steps=3)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 3
    for entry in entries:
        of_chains = {
            name: [entry[f"{name}/chain_{chain}"] for chain in range(3)]
            for name in ("loss", "kinetic_temperature", "kinetic_temperature_law", "distance_moved")
        }
        assert entry["loss"] == pytest.approx(sum(of_chains["loss"]) / 3, rel=1e-5)
        # at step size constant, 2 / (1 + beta)
        assert of_chains["kinetic_temperature_law"] == pytest.approx([2 / 1.9] * 3)
        assert all(0.5 < value < 2 for value in of_chains["kinetic_temperature"])
        assert min(of_chains["distance_moved"]) > 0
    moved = [entry["distance_moved/chain_0"] for entry in entries]
    assert moved == sorted(moved)


@pytest.mark.parametrize("lengths", [[8, 3, 12, 5], [6, 6, 6, 6]])
def test_logged_loss_is_transformers_mean_per_token(tmp_path, lengths):
    rows = runs.token_rows(lengths)
    common = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1, "logging_steps": 1}
    plain = TrainingArguments(
        str(tmp_path), report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no", **common
    )
    stock = Trainer(
        with_lora(tiny_llama()), plain, train_dataset=Dataset.from_list(rows), data_collator=runs.padding_collator()
    )
    stock.train()
    ours = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=1, init_jitter=0.0),
        train=rows,
        collator=runs.padding_collator(),
        **common,
    )
    ours.train()
    assert ours.state.log_history[0]["loss"] == pytest.approx(stock.state.log_history[0]["loss"], rel=1e-5)
    assert ours.state.log_history[0]["loss/chain_0"] == pytest.approx(stock.state.log_history[0]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("epochs", "updates"),
    [(1, 3), (0.5, 2), (1.5, 5), (3, 9)],  # 10 rows, 4 an update: 3 updates an epoch, none of them short
)
def test_epochs_may_be_fractions(tmp_path, epochs, updates):
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        max_steps=-1,
        num_train_epochs=epochs,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    assert trainer.train().global_step == updates
    assert trainer.run.num_updates == updates
    assert len(trainer.run.draws) == 1


def test_exact_kernels_see_all_data_in_every_move(tmp_path):
    trainer = runs.trainer(
        tmp_path,
        METHODS["hmc"](num_chains=2, num_leapfrog=2),
        max_steps=-1,
        num_train_epochs=4,
        gradient_accumulation_steps=3,
    )
    assert trainer.train().global_step == 4
    assert trainer.args.gradient_accumulation_steps == 5  # 10 rows, 2 at a time


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
    monkeypatch.setattr(starting, "build", lambda config, problem: kernel)
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


def test_batch_posterior_is_saved_as_a_tempered_likelihood(tmp_path):
    config = METHODS["penalty"](num_chains=2, batch_posterior=True)
    trainer = runs.trainer(tmp_path, config, gradient_accumulation_steps=3)
    trainer.train()
    method = trainer.posterior.config.method
    assert (method["temperature"], method["temper"], method["batch_posterior"]) == (5.0, "likelihood", False)  # 10 / 2


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({}, {}, "penalty needs at least 2 batches per update to estimate their variance, got 1"),
        ({"num_leapfrog": 1}, {"gradient_accumulation_steps": 2}, "penalty needs at least 3 batches per update"),
        ({"replacement": False}, {"gradient_accumulation_steps": 6}, "cannot draw 12 different rows of 10"),
    ],
)
def test_incomparable_batches_are_refused_before_training(tmp_path, fields, changes, message):
    with pytest.raises(ValueError, match=message):
        runs.trainer(tmp_path, METHODS["penalty"](num_chains=2, **fields), **changes)


@pytest.mark.parametrize(("replacement", "factor"), [(True, 1.0), (False, 0.4)])
def test_rows_drawn_once_get_a_finite_population_factor(tmp_path, replacement, factor):
    config = METHODS["penalty"](num_chains=2, replacement=replacement)
    trainer = runs.trainer(tmp_path, config, gradient_accumulation_steps=3, max_steps=2)
    trainer.train()
    (entry, *_) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["finite_population_factor/chain_1"] == pytest.approx(factor)  # 6 of 10 rows
    assert entry["penalty/chain_1"] > 0


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step, self.seen = step, []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(kwargs["optimizer"].param_groups[0]["lr"])
        control.should_training_stop |= state.global_step >= self.step


@pytest.mark.parametrize(("step", "draws"), [(1, 1), (4, 1), (5, 2)])
def test_a_callback_may_stop_the_run(tmp_path, step, draws):
    """Draws are due after updates 4, 5 and 6; what was not reached is not made up."""
    callback = StopAfter(step)
    config = SGHMCConfig(num_chains=2, draws_per_chain=3)
    trainer = runs.trainer(tmp_path, config, callbacks=[callback])
    assert trainer.train().global_step == step
    assert callback.seen == [1e-2] * step
    assert trainer.posterior.config.num_members == 2 * draws


@pytest.mark.parametrize("name", ["sghmc", "mean_field", "hmc"])
def test_a_run_stopped_in_its_warm_start_has_members(tmp_path, name):
    config = METHODS[name](num_chains=2, warm_start_steps=3)
    trainer = runs.trainer(tmp_path, config, callbacks=[StopAfter(2)])
    trainer.train()
    assert trainer.posterior.sample(2).isfinite().all()


def test_early_stopping_reads_the_mixture(tmp_path):
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        eval_dataset=runs.token_rows(3, seed=1),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=100.0)],
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="eval_nll",
        greater_is_better=False,
    )
    assert trainer.train().global_step == 3  # the first evaluation is the best; two more are not 100 nats better


def test_schedules_of_transformers_drive_the_step_size(tmp_path):
    callback = StopAfter(99)
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=1),
        callbacks=[callback],
        max_steps=8,
        lr_scheduler_type="cosine_with_restarts",
        lr_scheduler_kwargs={"num_cycles": 2},
    )
    trainer.train()
    # on_step_end sees the step size of the next update
    expected = [1e-2 * 0.5 * (1 + math.cos(math.pi * (2 * s / 8 % 1))) for s in range(1, 8)] + [0.0]
    assert callback.seen == pytest.approx(expected, abs=1e-9)
    laws = [entry["kinetic_temperature_law/chain_0"] for entry in trainer.state.log_history if "loss" in entry]
    # beta_t = 1 - (1 - beta) sqrt(l_t / l_0): friction is fixed
    assert laws[2] == pytest.approx(2 / (2 - 0.1 * math.sqrt(0.5)), rel=1e-6)


@pytest.mark.parametrize("bf16", [False, True])
def test_training_twice_starts_a_new_run_where_the_first_ended(tmp_path, bf16):
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2, draws_per_chain=2), bf16=bf16)
    trainer.train()
    first = trainer.posterior.approximation.theta.clone()
    trainer.train()
    second = trainer.posterior.approximation.theta
    assert trainer.run.num_updates == 6
    assert second.shape == first.shape
    assert not torch.equal(first, second)
    assert trainer.bayesian.num_members == 4


def test_a_seed_determines_the_run(tmp_path):
    def theta(**changes: Any) -> Tensor:
        trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), max_steps=3, **changes)
        trainer.train()
        return trainer.posterior.approximation.theta

    assert torch.equal(theta(), theta())
    assert not torch.equal(theta(), theta(seed=1))
    assert not torch.equal(theta(), theta(data_seed=1))


def test_a_random_collator_keeps_its_randomness_with_dropout(tmp_path):
    """Seeding dropout must not freeze what else draws from the global generator."""
    seen = []

    def collate(rows: list[dict]) -> dict[str, Tensor]:
        seen.append(torch.rand(()).item())
        return default_data_collator(rows)

    runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        model=with_lora(tiny_llama(), lora_dropout=0.1),
        collator=collate,
        max_steps=4,
    ).train()
    assert len(set(seen[-6:])) == 6


def test_the_model_comes_back_as_it_was(tmp_path):
    model = with_lora(tiny_llama())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), model=model)
    trainer.train()
    assert trainer.bayesian.detach() is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_posterior_before_training_is_refused(tmp_path):
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2))
    with pytest.raises(ValueError, match=r"call train\(\) first"):
        trainer.save_model()


def test_metrics_of_several_eval_sets_are_kept_by_name(tmp_path):
    sets = {name: Dataset.from_list(runs.token_rows(3, seed=seed)) for seed, name in enumerate(("near", "far"))}
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2, warm_start_steps=2), eval_dataset=sets)
    trainer.train()
    trainer.save_model()
    kept = trainer.posterior.config.metrics
    assert {"near_nll", "far_nll", "near_map_nll", "far_map_nll", "far_epistemic"} <= kept.keys()


@pytest.mark.parametrize("reason", ["no row", "no labels", "all ignored", "no full batch"])
@pytest.mark.parametrize("several", [False, True])
def test_held_out_rows_without_a_term_lose_no_posterior(tmp_path, caplog, reason, several):
    rows = runs.label_rows(4, seed=1)
    unlabelled = [{name: value for name, value in row.items() if name != "label"} for row in rows]
    empty = {
        "no row": Dataset.from_list(rows).select([]),
        "no labels": Dataset.from_list(unlabelled),
        "all ignored": Dataset.from_list([{**row, "label": -100} for row in rows]),
        "no full batch": Dataset.from_list(rows[:2]),
    }[reason]
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2, warm_start_steps=2),
        model=with_lora(tiny_bert()),
        train=runs.label_rows(8),
        eval_dataset={"near": Dataset.from_list(rows), "far": empty} if several else empty,
        eval_strategy="steps",
        eval_steps=3,
        dataloader_drop_last=reason == "no full batch",
    )
    trainer.train()
    trainer.save_model()
    assert f"no likelihood term in eval_dataset{' ' + repr('far') if several else ''}, so" in caplog.text
    assert runs.equal(Posterior.from_pretrained(tmp_path).approximation, trainer.posterior.approximation)
    kept = trainer.posterior.config.metrics
    assert not any(name.startswith("far_") for name in kept)
    assert {"near_nll", "near_map_nll"} <= kept.keys() if several else not kept


def test_metrics_at_save_set_the_posterior_beside_a_map_estimate(tmp_path):
    rows = runs.token_rows(4, seed=1)
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), eval_dataset=rows)
    trainer.train()
    trainer.save_model()
    kept = trainer.posterior.config.metrics
    assert kept["nll"] == trainer.evaluate()["eval_nll"]  # and the posterior is what is shown afterwards
    point = map_of_run(trainer.posterior, trainer.active)
    with torch.no_grad():
        trainer.bayesian.show(point)
        batch = default_data_collator(rows)
        assert kept["map_nll"] == pytest.approx(float(trainer.bayesian(**batch).loss), rel=1e-5)


def test_a_map_estimate_follows_the_posteriors_own_energy(tmp_path):
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=1, prior_std=0.5, warm_start_learning_rate=0.02),
        per_device_train_batch_size=10,
        max_steps=300,
        map_updates=300,
    )
    trainer.train()
    start, point = trainer.posterior.representative[None], map_of_run(trainer.posterior, trainer.active)
    batch = default_data_collator(runs.token_rows())

    def energy(theta: Tensor, prior_weight: float) -> tuple[float, Tensor]:
        leaf = theta.detach().requires_grad_()
        value = trainer.bayesian(**batch, theta=leaf, folded=False).loss.sum()
        value = value - prior_weight * trainer.active.prior.log_prob(leaf).sum()
        return float(value.detach()), torch.autograd.grad(value, leaf)[0]

    before, after = energy(start, 1.0), energy(point, 1.0)
    assert after[0] < before[0]
    assert after[1].norm() < 0.05 * before[1].norm()
    # at the maximum the two forces cancel; of a prior with half the weight (the twin) half its force would be left, and
    # the two sides would change places
    assert after[1].norm() < energy(point, 0.5)[1].norm()


@pytest.mark.parametrize(
    ("name", "polished"),
    [("map", False), ("ensemble", False), ("laplace", False), ("sgd_mc", True), ("swa", True), ("swag", True)],
)
def test_sgd_iterates_are_no_map_estimate_until_polished(tmp_path, name, polished):
    trainer = runs.trainer(tmp_path, METHODS[name](burn_in=0.5), max_steps=40)
    trainer.train()
    posterior = trainer.posterior
    assert torch.equal(map_of_run(posterior, trainer.active)[0], posterior.representative) is not polished


def test_a_map_estimate_may_be_left_out(tmp_path):
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), eval_dataset=runs.token_rows(4), map_updates=0)
    trainer.train()
    trainer.save_model()
    assert "map_nll" not in trainer.posterior.config.metrics


def test_saving_after_an_evaluation_does_not_evaluate_again(tmp_path, monkeypatch):
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), eval_dataset=runs.token_rows(4), map_updates=0)
    trainer.train()
    trainer.evaluate()
    monkeypatch.setattr(trainer.bayesian, "evaluate_batch", None)
    trainer.save_model()
    assert trainer.posterior.config.metrics["nll"] > 0


def test_a_posterior_worse_than_its_map_estimate_is_said(tmp_path, caplog):
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), eval_dataset=runs.token_rows(4))
    compare(TrainerHost(trainer), "", 2.0, 1.5, 0.1)
    assert "worse than a MAP estimate's 1.5000" in caplog.text
    caplog.clear()
    compare(TrainerHost(trainer), "", 1.5, 2.0, 0.1)
    assert not caplog.records


# -- data sets without a length --------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self.rows


def test_a_stream_trains_on_its_rows_in_order_scaled_to_num_data(tmp_path, evaluations):
    def build() -> Any:
        return with_lora(tiny_llama(dtype=torch.float64))

    rows = runs.token_rows([8, 20, 8, 6, 9])
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        model=build(),
        train=Stream(rows),
        collator=runs.padding_collator(),
        minibatch="shared",
        num_data=1000.0,
        max_steps=3,
    )
    trainer.train()
    # the fifth row fills no batch: after the first two the stream begins again
    pairs = [rows[:2], rows[2:4], rows[:2]]
    for found, pair in zip(evaluations, pairs, strict=True):
        terms = sum(len(row["labels"]) - 1 for row in pair)
        expected = full_data(build, trainer, pair)
        torch.testing.assert_close(found.log_lik, 1000 / terms * expected.log_lik, rtol=1e-6, atol=0)
        assert relative(found.grad_log_lik, 1000 / terms * expected.grad_log_lik) < 1e-6


def test_a_stream_that_was_mapped_loses_the_columns_not_taken(tmp_path):
    def named(row):
        return row | {"name": "x"}

    stream = Dataset.from_list(runs.token_rows(6)).to_iterable_dataset().map(named)
    assert stream.column_names is None
    trainer = runs.trainer(tmp_path, MAPConfig(), train=stream, minibatch="shared", num_data=50.0, map_updates=0)
    assert set(trainer.rows.first()) == {"input_ids", "attention_mask", "labels"}


def test_each_stream_update_is_scaled_by_its_own_micro_batches(tmp_path, evaluations):
    def build() -> Any:
        return with_lora(tiny_llama(dtype=torch.float64))

    rows = runs.token_rows([8, 20, 8, 6, 9, 12, 30])
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        model=build(),
        train=Stream(rows),
        minibatch="shared",
        num_data=1000.0,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
        max_steps=5,
    )
    trainer.train()
    # the seventh row is no update: its gradient is in none
    updates = [rows[:3], rows[3:6], rows[:3], rows[3:6], rows[:3]]
    for found, update in zip(evaluations, updates, strict=True):
        terms = sum(len(row["labels"]) - 1 for row in update)
        expected = full_data(build, trainer, update)
        torch.testing.assert_close(found.log_lik, 1000 / terms * expected.log_lik, rtol=1e-6, atol=0)
        assert relative(found.grad_log_lik, 1000 / terms * expected.grad_log_lik) < 1e-6


class Shuffled(Stream):
    """Knows which pass it is in, as transformers asks of data sets that shuffle."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rng = torch.Generator().manual_seed(self.epoch)
        yield from (self.rows[i] for i in torch.randperm(len(self.rows), generator=rng))


class Drawing(Stream):
    """Draws as it goes from a ``generator`` of its own, which transformers seeds anew for every pass."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__(rows)
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in self.rows:
            yield self.rows[int(torch.randint(len(self.rows), (), generator=self.generator))]


STREAMS = {
    "in order": Stream,
    "set_epoch": Shuffled,
    "generator": Drawing,
    "datasets": lambda rows: Dataset.from_list(rows).to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=4),
}


def of_a_stream(folder: Path, kind: str, seen: list[list[int]], **changes: Any) -> BayesianTrainer:
    """A run that notes the first token of every row of each update; its probe looks in the middle of a pass."""
    fields: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "probe_steps": 5, "max_steps": 9}
    trainer = runs.trainer(
        folder,
        SGHMCConfig(num_chains=2, draws_per_chain=2),
        train=STREAMS[kind](runs.token_rows(20)),
        minibatch="shared",
        num_data=1000.0,
        **(fields | changes),
    )
    take = trainer.get_batch_samples

    def note(*args: Any) -> Any:
        batches, terms = take(*args)
        seen.append([int(row[0]) for batch in batches for row in batch["input_ids"]])
        return batches, terms

    trainer.get_batch_samples = note
    return trainer


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("done", [2, 5])
def test_a_resumed_stream_goes_on_where_it_was(tmp_path, accumulation, kind, done):
    """Of 20 rows in updates of 8, or of 6 in three batches: in the first pass or at its end, and in a later one.

    There, after five updates, the probe has just looked.
    """
    size, shown, again = {1: 8, 3: 2}[accumulation], [], []
    changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    whole = of_a_stream(tmp_path, kind, shown, **changes)
    whole.train()
    resumed = of_a_stream(tmp_path / "resumed", kind, again, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{done}"))
    assert again == shown[done:]
    assert runs.equal(resumed.posterior.approximation, whole.posterior.approximation)
    assert torch.equal(resumed.monitor.probes[-1], whole.monitor.probes[-1])


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_is_told_which_pass_it_is_in(tmp_path, kind):
    shown: list[list[int]] = []
    of_a_stream(tmp_path, kind, shown, save_strategy="no", max_steps=30).train()
    passes = [list(itertools.chain(*shown[i : i + 10])) for i in (0, 10, 20)]
    assert (passes[0] == passes[1] == passes[2]) == (kind == "in order")
    if kind != "generator":  # which repeats rows
        assert all(sorted(rows) == sorted(passes[0]) for rows in passes)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["set_epoch", "datasets"])
def test_workers_show_each_row_of_a_stream_once_in_a_pass(tmp_path, kind, persistent):
    """Three shards for two workers: one of them has twice the rows of the other."""
    shown: list[list[int]] = []
    workers = {"dataloader_num_workers": 2 if kind == "datasets" else 1, "dataloader_persistent_workers": persistent}
    rows = runs.token_rows(20)
    of_a_stream(
        tmp_path, kind, shown, save_strategy="no", max_steps=40, per_device_train_batch_size=1, **workers
    ).train()
    passes = [list(itertools.chain(*shown[i : i + 20])) for i in (0, 20)]
    assert [sorted(found) for found in passes] == 2 * [sorted(row["input_ids"][0] for row in rows)]
    assert passes[0] != passes[1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (5, r"pass 1 over train_dataset \(Stream\) ended after 2 batches of 2 rows .* takes 3\. Lower"),
        (3, r"pass 1 over train_dataset \(Stream\) ended after 1 batches of 2 rows"),
        (1, r"train_dataset \(Stream\) gave no row, or fewer than per_device_train_batch_size=2"),
        (0, r"train_dataset \(Stream\) gave no row"),
    ],
)
def test_a_stream_of_less_than_an_update_is_refused(tmp_path, rows, message):
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        train=Stream(runs.token_rows(6)[:rows]),
        minibatch="shared",
        num_data=1000.0,
        gradient_accumulation_steps=3,
    )
    trainer.get_batch_samples = limited(trainer.get_batch_samples)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_stream_that_does_not_begin_again_is_refused(tmp_path):
    class Once(Stream):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            while self.rows:
                yield self.rows.pop()

    trainer = runs.trainer(
        tmp_path, SGHMCConfig(), train=Once(runs.token_rows(8)), minibatch="shared", num_data=1000.0, probe_steps=0
    )
    trainer.get_batch_samples = limited(trainer.get_batch_samples)
    with pytest.raises(ValueError, match=r"pass 2 over train_dataset \(Once\) ended after 0 batches .* begin again"):
        trainer.train()


def limited(take: Any) -> Any:
    """For a loop that has no other end."""
    left = iter(range(20))

    def checked(*args: Any) -> Any:
        assert next(left, None) is not None, "no update comes of twenty requests"
        return take(*args)

    return checked


def test_a_model_that_another_trainer_holds_is_refused(tmp_path):
    model = with_lora(tiny_llama())
    first = runs.trainer(tmp_path / "first", SGHMCConfig(), model=model)
    with pytest.raises(ValueError, match="attached already: detach"):
        runs.trainer(tmp_path / "second", SGHMCConfig(), model=model)
    first.bayesian.detach()
    runs.trainer(tmp_path / "second", SGHMCConfig(), model=model).bayesian.detach()


def test_push_uploads_no_checkpoints_and_no_pickles(tmp_path, monkeypatch):
    sent: dict[str, Any] = {}

    def upload_folder(self: HfApi, *, folder_path: str, allow_patterns: list[str], **others: Any) -> Any:
        sent.update(others, allow_patterns=allow_patterns, files={p.name for p in Path(folder_path).rglob("*")})
        return SimpleNamespace(oid="1", commit_url="https://huggingface.co/user/x/commit/1")

    monkeypatch.setattr(
        HfApi, "create_repo", lambda self, repo_id, **others: RepoUrl(f"https://huggingface.co/{repo_id}")
    )
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    trainer = runs.trainer(tmp_path, SGHMCConfig(), hub_model_id="user/x", save_strategy="steps", save_steps=3)
    trainer.train()
    (tmp_path / "training_args.bin").write_bytes(b"a pickle that may hold a token")
    trainer.push_to_hub()
    assert sent["repo_id"] == "user/x"
    assert not [
        name for name in sent["allow_patterns"] if "checkpoint" in name or name.endswith((".bin", ".pt", ".pth"))
    ]
    assert "manifest.json" in sent["allow_patterns"]


@pytest.mark.parametrize("prior_std", [None, 2.0, {"lora_A": 1.0, "lora_B": 4.0}])
def test_the_suggested_prior_width_is_no_longer_wide(tmp_path, caplog, prior_std):
    def ratio_and_advice(prior_std):
        caplog.clear()
        model = with_lora(tiny_llama())
        runs.trainer(tmp_path, MAPConfig(prior_std=prior_std), model=model, max_steps=1, map_updates=0).train()
        found = re.search(
            r"by (\S+) times their RMS: prior_std=(.*) is wide .*alpha; (.*) (\S+) the ratio", caplog.text
        )
        return None if found is None else (found[2], found[3], float(found[4]))

    given, how, number = ratio_and_advice(prior_std)
    assert given == str(1.0 if prior_std is None else prior_std)  # the default, by its number
    assert how == ("multiplied by" if isinstance(prior_std, dict) else "below")
    number *= 0.97  # it was rounded to two digits
    narrow = {name: std * number for name, std in prior_std.items()} if isinstance(prior_std, dict) else number
    assert ratio_and_advice(narrow) is None
