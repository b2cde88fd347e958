"""The mixin before TRL's RewardTrainer. TRL is no dependency: ``make test-slow`` installs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForSequenceClassification, PreTrainedModel

from hf_bayes import (
    BayesianModelForSequenceClassification,
    BayesianTrainerMixin,
    BayesianTrainingArguments,
    LaplaceConfig,
    SGHMCConfig,
)
from hf_bayes.decide.rewards import RewardModel
from tests.tiny_models import tiny_llama
from tests.training.preference_rows import IMPLICIT, MESSAGES, PLAIN, tokenizer

pytestmark = pytest.mark.slow


def reward_model() -> PreTrainedModel:
    """A tiny Llama whose head has one output."""
    torch.manual_seed(0)
    base = tiny_llama()
    base.config.num_labels = 1
    model = LlamaForSequenceClassification(base.config)
    model.model.load_state_dict(base.model.state_dict())
    return model


def settings(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_steps": 5, "per_device_train_batch_size": 8, "learning_rate": 0.05, "report_to": "none", "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "max_length": 64, "disable_dropout": False,
    }  # fmt: skip
    return fields | changes


def bayesian(folder: Path, model: Any, method: Any, rows: Any = PLAIN, kwargs: Any = None, **changes: Any) -> Any:
    from trl import RewardConfig, RewardTrainer

    class Args(BayesianTrainingArguments, RewardConfig): ...

    class BayesianReward(BayesianTrainerMixin, RewardTrainer): ...

    return BayesianReward(
        model, method, args=Args(output_dir=str(folder), **settings(**changes)),
        train_dataset=Dataset.from_list(rows), **{"processing_class": tokenizer(), "subspace": "all"} | (kwargs or {}),
    )  # fmt: skip


def test_a_member_at_temperature_zero_takes_the_steps_of_trl(tmp_path: Path) -> None:
    from trl import RewardConfig, RewardTrainer

    std = 2.0
    host = RewardTrainer(
        reward_model(),
        args=RewardConfig(
            output_dir=str(tmp_path / "trl"), optim="sgd", weight_decay=1 / (len(PLAIN) * std**2), max_grad_norm=0.0,
            lr_scheduler_type="constant", bf16=False, **settings(),
        ),
        train_dataset=Dataset.from_list(PLAIN),
        processing_class=tokenizer(),
    )  # fmt: skip
    # transformers leaves biases and norms out of weight decay, and the prior holds for every parameter
    host.optimizer = torch.optim.SGD(host.model.parameters(), lr=0.05, weight_decay=1 / (len(PLAIN) * std**2))
    host.train()
    expected = [entry["loss"] for entry in host.state.log_history if "loss" in entry]
    method = SGHMCConfig(
        num_chains=1, prior_std=std, temperature=0.0, momentum=0.0, warm_start_steps=0, init_jitter=0.0
    )
    ours = bayesian(tmp_path / "ours", reward_model(), method)
    ours.train()
    found = [entry["loss"] for entry in ours.state.log_history if "loss" in entry]
    # all rows are in every batch, so that only float32 sums in another order differ
    assert found == pytest.approx(expected, abs=1e-6)
    assert max(found) - min(found) > 1e-2
    # rounding of five steps
    for name, value in host.model.named_parameters():
        column = ours.bayesian.layout.unflatten(ours.bayesian.current.detach())[name]
        assert torch.allclose(column[0], value, atol=1e-5)


@pytest.mark.parametrize("rows", [PLAIN, IMPLICIT, MESSAGES], ids=["prompt", "implicit", "conversation"])
def test_every_format_of_pairs_ends_in_a_posterior(tmp_path: Path, rows: Any) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS", modules_to_save=["score"])
    method = SGHMCConfig(num_chains=2, draws_per_chain=2, prior_std=0.5)
    kwargs = {"peft_config": lora, "eval_dataset": Dataset.from_list(rows), "subspace": "trainable"}
    reward_model().save_pretrained(tmp_path / "base")
    model = LlamaForSequenceClassification.from_pretrained(tmp_path / "base")
    run = bayesian(tmp_path / "run", model, method, rows, kwargs, per_device_train_batch_size=2, max_steps=8)
    run.train()
    assert run.rows.num_data == 8  # pairs, and not texts
    assert {"eval_nll", "eval_accuracy", "eval_epistemic"} <= run.evaluate().keys()
    run.save_model(str(tmp_path / "posterior"))
    loaded = BayesianModelForSequenceClassification.from_pretrained(tmp_path / "posterior")
    assert loaded.likelihood == run.bayesian.likelihood
    texts = [row["chosen"] for row in IMPLICIT]
    mine, theirs = (RewardModel(model, tokenizer()).score(texts) for model in (loaded, run.bayesian))
    assert torch.equal(mine.mean, theirs.mean)


@pytest.mark.parametrize("method", [SGHMCConfig(), LaplaceConfig(structure="kronecker")])
def test_a_run_with_nothing_set_ends_in_a_posterior(tmp_path: Path, method: Any) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS", modules_to_save=["score"])
    kwargs = {"peft_config": lora, "eval_dataset": Dataset.from_list(PLAIN), "subspace": "trainable"}
    reward_model().save_pretrained(tmp_path / "base")
    model = LlamaForSequenceClassification.from_pretrained(tmp_path / "base")
    run = bayesian(tmp_path / "run", model, method, PLAIN, kwargs, learning_rate=None, max_steps=60)
    run.train()
    metrics = run.evaluate()
    run.save_model(str(tmp_path / "posterior"))
    loaded = BayesianModelForSequenceClassification.from_pretrained(tmp_path / "posterior")
    batch = run.rows.first()
    # the same members, or the same Gaussian
    assert float(loaded.evaluate_batch(batch)[0]["nll"].mean()) == pytest.approx(metrics["eval_nll"], abs=1e-4)
    assert bool((RewardModel(loaded, tokenizer()).score(["a text"]).std > 0).all())


def test_a_base_given_by_name_gets_a_head_of_one_output(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    method = SGHMCConfig(num_chains=2, prior_std=0.5)
    run = bayesian(tmp_path / "run", str(tmp_path / "base"), method, kwargs={"processing_class": None})
    run.train()
    assert run.bayesian.config.num_labels == 1


def test_parts_of_the_loss_that_are_no_likelihood_are_refused(tmp_path: Path) -> None:
    method = SGHMCConfig(num_chains=1, prior_std=0.5)
    with pytest.raises(ValueError, match=r"center_rewards_coefficient=0\.01 is refused"):
        bayesian(tmp_path, reward_model(), method, center_rewards_coefficient=0.01)
    with pytest.raises(ValueError, match="margins of preferences"):
        bayesian(tmp_path, reward_model(), method, [row | {"margin": 0.1} for row in PLAIN])
