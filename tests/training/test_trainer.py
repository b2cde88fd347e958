from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, default_data_collator

from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.methods.registry import METHODS
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from tests import runs
from tests.tiny_models import tiny_bert, tiny_gpt2, tiny_llama, with_lora
from tests.training.trained import relative

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


# -- the run ---------------------------------------------------------------------------------------------------------

SAMPLER = {"num_chains": 2, "draws_per_chain": 2}
GAUSSIANS = ("training_free", "blob", "mean_field", "ivon", "low_rank_vi", "full_rank_vi", "ekf", "laplace", "swag")
SETTINGS: dict[str, dict[str, Any]] = {
    "map": {"num_chains": 1},
    "ensemble": {"num_chains": 3},
    "mean_field": {"num_chains": 2},
    "ivon": {"num_chains": 2},
    "low_rank_vi": {"num_chains": 2},
    "full_rank_vi": {"num_chains": 2},
    "ekf": {"num_chains": 2},
    "hmc": {**SAMPLER, "num_leapfrog": 2},
    "laplace": {"num_chains": 2},
    "penalty": {**SAMPLER, "num_leapfrog": 1},
    "swa": {"num_chains": 2},
    "swag": {"num_chains": 2},
    "training_free": {"num_chains": 2},
    "mc_dropout": {"num_chains": 2, "num_masks": 1},
}


@pytest.mark.parametrize("name", METHODS, ids=str)
@pytest.mark.parametrize("warm_start_steps", [0, 2])
def test_every_method_trains_a_causal_lm_to_a_posterior(tmp_path, name, warm_start_steps):
    config = METHODS[name](**SETTINGS.get(name, SAMPLER), warm_start_steps=warm_start_steps)
    batches = {"gradient_accumulation_steps": config.requirements.min_batches}
    rows = {"train": runs.token_rows(12), "eval_dataset": runs.token_rows(4, seed=1)}  # six updates are one pass
    trainer = runs.trainer(tmp_path, config, **rows, **batches)
    output = trainer.train()
    posterior = trainer.posterior
    members = posterior.sample(None)
    assert output.global_step == 6
    assert members.isfinite().all()
    if name not in ("metropolis", "hmc", "penalty", "gps"):  # these may have refused all six moves
        assert (members - trainer.setup.start).abs().max() > 0
    expected = config.num_chains * config.draws_per_chain
    assert posterior.config.num_members == (0 if isinstance(posterior.approximation, Gaussian) else expected)
    assert isinstance(posterior.approximation, Gaussian) == (name in GAUSSIANS)
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
    assert trainer.rows.num_data == 8
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


def test_each_log_line_has_the_numbers_of_every_chain(tmp_path):
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


def test_a_second_run_has_noise_and_rows_of_its_own(tmp_path):
    trainer = runs.trainer(tmp_path, SGLDConfig(num_chains=2, draws_per_chain=8), max_steps=40)
    steps, rows = [], []
    for _ in range(2):
        trainer.train()
        steps.append(torch.stack(trainer.run.draws, 1).diff(dim=1).flatten())
        rows.append([batch["input_ids"].tolist() for batch in trainer.rows.start_loader()])
    # the mean of over 1,000 products of independent numbers; it is .9996 if the noise is the same
    assert abs(float(torch.corrcoef(torch.stack(steps))[0, 1])) < 0.15
    assert rows[0] != rows[1]


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


def test_a_search_of_trainer_points_to_tune(tmp_path):
    with pytest.raises(ValueError, match=r"hyperparameter_search is refused.*hf_bayes\.tune.*docs/automatic\.md"):
        runs.trainer(tmp_path, SGHMCConfig(num_chains=2)).hyperparameter_search(n_trials=2, direction="minimize")
