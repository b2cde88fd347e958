"""A trainer makes the adapter of a ``peft_config``, and loads a model by its name, before it attaches anything."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, default_data_collator, set_seed

from hf_bayes import BayesianTrainer, BayesianTrainingArguments, SGHMCConfig, attach
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.announcement import announce
from hf_bayes.training.prepared_model import prepared, unit_of
from hf_bayes.training.trainer_host import TrainerHost
from tests import runs
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_tokenizer, with_lora
from tests.training.trained import require_loaded_and_resumed

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@dataclass
class NamingArguments(BayesianTrainingArguments):
    """Arguments of a host that loads models by name, as TRL's do."""

    model_init_kwargs: dict[str, Any] | None = None


def trainer(folder: Path, model: Any, *, args: Any = None, **kwargs: Any) -> BayesianTrainer:
    rows = Dataset.from_list(runs.token_rows())
    args = runs.arguments(folder, save_strategy="steps", save_steps=3) if args is None else args
    method = SGHMCConfig(num_chains=2, prior_std=0.1)
    kwargs = {"method": method, "train_dataset": rows, "data_collator": default_data_collator} | kwargs
    return BayesianTrainer(model, args=args, **kwargs)


@pytest.fixture
def base(tmp_path: Path) -> str:
    tiny_llama().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def test_a_peft_config_becomes_the_adapter_and_alone_is_random(tmp_path: Path) -> None:
    built = trainer(tmp_path, tiny_llama(), peft_config=LoraConfig(**LORA))
    assert {name.split(".")[-3] for name in built.bayesian.layout.names} == {"lora_A", "lora_B"}
    assert len(built.bayesian.layout.names) == 2 * 2 * 2
    set_seed(built.args.seed)
    expected = get_peft_model(tiny_llama(), LoraConfig(**LORA))
    with attach(expected) as by_hand:
        assert torch.equal(built.setup.start, by_hand.theta[0])


def test_a_run_of_a_peft_config_is_saved_loaded_and_resumed(tmp_path: Path, base: str) -> None:
    def run(folder: str, **kwargs: Any) -> Any:
        model = LlamaForCausalLM.from_pretrained(base)
        built = trainer(tmp_path / folder, model, peft_config=LoraConfig(**LORA))
        built.train(**kwargs)
        return built

    require_loaded_and_resumed(run("whole"), run, tmp_path)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("start", [True, "pissa"])
def test_a_refused_run_gives_the_base_back_without_the_adapter(tmp_path: Path, build: Any, start: Any) -> None:
    model = build()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=start)
    with pytest.raises(ValueError, match="labels"):
        trainer(tmp_path, model, peft_config=config, train_dataset=Dataset.from_list([{"input_ids": [5]}]))
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [*before]
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("make", "config", "message"),
    [
        (lambda: with_lora(tiny_llama()), LoraConfig(**LORA), "peft_config is given with a PeftModel"),
        (lambda: attach(with_lora(tiny_llama())), LoraConfig(**LORA), "expected a transformers model without"),
        (tiny_llama, {"r": 2}, "peft_config must be a config of peft"),
    ],
    ids=["adapter", "attached", "dict"],
)
def test_a_peft_config_that_fits_no_model_is_refused(tmp_path: Path, make: Any, config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, make(), peft_config=config)


def test_a_model_is_loaded_by_its_name_where_the_host_does_so(tmp_path: Path, base: str) -> None:
    args = NamingArguments(**runs.arguments(tmp_path).to_dict() | {"model_init_kwargs": {"dtype": "bfloat16"}})
    built = trainer(tmp_path, base, args=args, peft_config=LoraConfig(**LORA))
    assert type(built.bayesian.core) is LlamaForCausalLM
    assert built.bayesian.core.dtype == torch.bfloat16
    assert built.bayesian.theta.dtype == torch.float32
    assert built.processing_class is not None
    assert args.model_init_kwargs == {"dtype": "bfloat16"}


def test_a_name_is_refused_where_the_host_takes_a_model(tmp_path: Path, base: str) -> None:
    with pytest.raises(ValueError, match=r"must be a transformers or peft model, got the name '.*': load it"):
        trainer(tmp_path, base)


def test_a_trainer_never_samples_a_whole_base_by_default(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"would sample all .* weights of the base model"):
        trainer(tmp_path, tiny_llama())
    assert trainer(tmp_path, tiny_llama(), subspace="all").bayesian.layout.names[0] == "model.embed_tokens.weight"


def test_the_names_of_random_parameters_are_said_before_training(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", logger="hf_bayes")
    built = trainer(tmp_path, tiny_llama(), peft_config=LoraConfig(**LORA))
    announce(ActiveRun(TrainerHost(built), built.setup, built.rows))
    assert "random parameters in 8 tensors" in caplog.text
    assert "random: 2 x model.layers.*.self_attn.q_proj.lora_A.default.weight, " in caplog.text


def reward_model(folder: Path, base: str) -> Any:
    """Load a base model as a trainer of rewards does."""
    args = NamingArguments(**runs.arguments(folder).to_dict())
    with prepared(base, args, None, {"processing_class": tiny_tokenizer()}, rewards=True) as model:
        return model


def test_the_new_head_of_a_reward_model_is_not_reported(tmp_path: Path, base: str, caplog: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reward_model(tmp_path, base).score.weight.shape[0] == 1
    assert not caplog.records


def test_a_reward_model_names_base_weights_that_are_not_kept(tmp_path: Path, base: str) -> None:
    file = Path(base, "model.safetensors")
    weights = load_file(file)
    weights["model.gate"] = weights.pop("model.norm.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with (
        pytest.warns(UserWarning, match=r"has no weights for model.norm.weight, so they are random"),
        pytest.warns(UserWarning, match=r"are left out: model.gate"),
    ):
        reward_model(tmp_path, base)


@pytest.mark.parametrize("rewards", [False, True])
def test_a_named_model_needs_no_method(tmp_path: Path, base: str, rewards: bool) -> None:
    args = NamingArguments(**runs.arguments(tmp_path).to_dict() | {"model_init_kwargs": None})
    assert unit_of(base, args, rewards=rewards) == ("example" if rewards else "token")
    built = trainer(tmp_path, base, args=args, method=None, peft_config=LoraConfig(**LORA))
    assert built.method.name == "ensemble"  # the run is too short for a ladder
