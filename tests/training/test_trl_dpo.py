"""The mixin before TRL's DPOTrainer. TRL is no dependency: ``make test-slow`` installs it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from hf_bayes import (
    BayesianModelForCausalLM,
    BayesianTrainerMixin,
    BayesianTrainingArguments,
    EnsembleConfig,
    SGHMCConfig,
)
from hf_bayes.training import dpo_compat
from tests.tiny_models import TEXTS, tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.slow

CHAT = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}</s>{% endfor %}"
PLAIN = [{"prompt": f"{n} ", "chosen": TEXTS[n % 4], "rejected": TEXTS[(n + 1) % 4][:20]} for n in range(8)]
IMPLICIT = [{"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in PLAIN]
MESSAGES = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "chosen": [{"role": "assistant", "content": row["chosen"]}],
        "rejected": [{"role": "assistant", "content": row["rejected"]}],
    }
    for row in PLAIN
]
IMPLICIT_MESSAGES = [
    {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]}  # type: ignore[operator]
    for row in MESSAGES
]
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
STD = 2.0


def tokenizer() -> Any:
    found = tiny_tokenizer()
    found.chat_template = CHAT
    return found


def settings(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_steps": 5, "per_device_train_batch_size": 8, "learning_rate": 0.5, "report_to": "none", "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "max_length": 64, "beta": 0.5,
    }  # fmt: skip
    return fields | changes


def bayesian(
    folder: Path, model: Any, method: Any = None, rows: Any = PLAIN, kwargs: Any = None, **changes: Any
) -> Any:
    from trl import DPOConfig, DPOTrainer

    class Args(BayesianTrainingArguments, DPOConfig): ...

    class BayesianDPO(BayesianTrainerMixin, DPOTrainer): ...

    method = method or SGHMCConfig(num_chains=2, draws_per_chain=2, prior_std=0.5)
    return BayesianDPO(
        model, method, args=Args(output_dir=str(folder), **settings(**changes)),
        train_dataset=Dataset.from_list(rows), **{"processing_class": tokenizer()} | (kwargs or {}),
    )  # fmt: skip


def saved(folder: Path, seed: int = 0) -> str:
    """Save a base, which TRL loads as its reference."""
    torch.manual_seed(seed)
    tiny_llama().save_pretrained(folder / f"base{seed}")
    return str(folder / f"base{seed}")


def adapted(base: str) -> Any:
    """Return a base with an adapter whose second factors are not zero."""
    torch.manual_seed(1)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), LoraConfig(**LORA))
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.3)
    return model


def of_trl(folder: Path, model: Any, kwargs: Any = None, **changes: Any) -> tuple[list[float], Any]:
    """Return the losses of DPOTrainer with plain SGD and the prior as weight decay, and its model."""
    from trl import DPOConfig, DPOTrainer

    decay = 1 / (len(PLAIN) * STD**2)
    host = DPOTrainer(
        model,
        args=DPOConfig(
            output_dir=str(folder), max_grad_norm=0.0, lr_scheduler_type="constant", bf16=False,
            gradient_checkpointing=False, **settings(**changes),
        ),
        train_dataset=Dataset.from_list(PLAIN), processing_class=tokenizer(), **kwargs or {},
    )  # fmt: skip
    # transformers leaves biases and norms out of weight decay, and the prior holds for every parameter
    trained = [value for value in host.model.parameters() if value.requires_grad]
    host.optimizer = torch.optim.SGD(trained, lr=host.args.learning_rate, weight_decay=decay)
    host.train()
    return [entry["loss"] for entry in host.state.log_history if "loss" in entry], host.model


def of_ours(folder: Path, model: Any, kwargs: Any = None, **changes: Any) -> tuple[list[float], Any]:
    """Return the losses of one member at T = 0, and the trainer."""
    method = SGHMCConfig(
        num_chains=1, prior_std=STD, temperature=0.0, momentum=0.0, warm_start_steps=0, init_jitter=0.0
    )
    ours = bayesian(folder, model, method, kwargs=kwargs, **changes)
    ours.train()
    return [entry["loss"] for entry in ours.state.log_history if "loss" in entry], ours


def test_a_member_at_temperature_zero_takes_the_steps_of_trl(tmp_path: Path) -> None:
    base = saved(tmp_path)
    rate = {"learning_rate": 0.05}
    expected, host = of_trl(tmp_path / "trl", LlamaForCausalLM.from_pretrained(base), **rate)
    found, ours = of_ours(tmp_path / "ours", LlamaForCausalLM.from_pretrained(base), {"subspace": "all"}, **rate)
    # all rows are in every batch, so that only float32 sums in another order differ
    assert found == pytest.approx(expected, abs=1e-6)
    assert max(found) - min(found) > 1e-2
    # rounding of five steps
    for name, value in host.named_parameters():
        column = ours.bayesian.layout.unflatten(ours.bayesian.current.detach())[name]
        assert torch.allclose(column[0], value, atol=1e-5)
