from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, Trainer, TrainingArguments

from hf_bayes import BayesianTrainer, BayesianTrainerMixin, BayesianTrainingArguments, MAPConfig, SGLDConfig
from hf_bayes.training.checks.arguments import REFUSED, refuse_arguments, refuse_types
from tests.tiny_models import tiny_bert, tiny_llama, with_lora

FURTHER: dict[str, dict[str, Any]] = {
    "fsdp_config": {"fsdp": True},
    "hub_strategy": {"push_to_hub": True},
    "load_best_model_at_end": {"eval_strategy": "steps", "save_strategy": "steps"},
    "liger_kernel_config": {"use_liger_kernel": True},
}
"""Arguments that take effect only beside others."""

VALUES: dict[str, Any] = {
    "optim": "sgd", "optim_args": "a=1", "optim_target_modules": "all", "adam_beta1": 0.5, "adam_beta2": 0.5,
    "adam_epsilon": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0, "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 1.0, "bf16_full_eval": True, "fp16": True, "fp16_full_eval": True, "torch_compile": True,
    "torch_compile_backend": "inductor", "torch_compile_mode": "default", "deepspeed": {}, "fsdp": True,
    "fsdp_config": {"min_num_params": 1}, "parallelism_config": None, "auto_find_batch_size": True,
    "ignore_data_skip": True, "save_only_model": True, "load_best_model_at_end": True,
    "train_sampling_strategy": "sequential", "hub_strategy": "every_save", "use_liger_kernel": True,
    "liger_kernel_config": {"rope": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


def test_every_refused_argument_has_a_value_here() -> None:
    assert VALUES.keys() == REFUSED


# a parallelism config is refused with the accelerator that it makes, and DeepSpeed is not installed
@pytest.mark.parametrize("name", sorted(REFUSED - {"parallelism_config", "deepspeed"}))
def test_an_argument_that_no_help_lists_is_refused(tmp_path: Path, model: PreTrainedModel, name: str) -> None:
    fields = {name: VALUES[name], **FURTHER.get(name, {})}
    with pytest.raises(ValueError):
        refuse_arguments(BayesianTrainingArguments(str(tmp_path), use_cpu=True, **fields), MAPConfig(), model, {})


def test_a_function_of_the_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model_init is refused.*Give model=.*hf_bayes\.tune"):
        BayesianTrainer(model_init=tiny_llama, args=BayesianTrainingArguments(str(tmp_path), use_cpu=True))
    with pytest.raises(ValueError, match=r"model is missing.*give it as model="):
        BayesianTrainer(args=BayesianTrainingArguments(str(tmp_path), use_cpu=True))


@pytest.mark.parametrize("name", ["optimizers", "optimizer_cls_and_kwargs", "compute_loss_func"])
def test_a_refused_object_says_what_to_do(tmp_path: Path, model: PreTrainedModel, name: str) -> None:
    args = BayesianTrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match=rf"{name} is refused.*Leave it out") as caught:
        refuse_arguments(args, MAPConfig(), model, {name: len})
    assert ("optimizer." in str(caught.value)) == ("optimizer" in name)


@pytest.mark.parametrize("name", ["noise_std", "num_data", "data_unit", "calibrate", "members_per_pass"])
def test_a_training_argument_is_sent_to_args(tmp_path: Path, name: str) -> None:
    args = BayesianTrainingArguments(str(tmp_path), use_cpu=True)
    for num_labels in (1, 3):
        with pytest.raises(ValueError, match=rf"{name} is refused: .* args=BayesianTrainingArguments\({name}=\.\.\.\)"):
            BayesianTrainer(tiny_bert(num_labels=num_labels), MAPConfig(), args, **{name: 0.1})


def test_advice_on_compiling_names_the_blocks_of_the_model(tmp_path: Path) -> None:
    args = BayesianTrainingArguments(str(tmp_path), use_cpu=True, torch_compile=True)
    with pytest.raises(ValueError, match=r"for block in model\.bert\.encoder\.layer: block\.compile"):
        refuse_arguments(args, MAPConfig(), tiny_bert(), {})
    with pytest.raises(ValueError, match=r"for block in model\.get_base_model\(\)\.model\.layers: block"):
        refuse_arguments(args, MAPConfig(), with_lora(tiny_llama()), {})


@pytest.mark.parametrize(
    ("kind", "schedule", "words"),
    [
        ("constant", None, "lr_scheduler_type='constant' has none. Set 'constant_with_warmup' or 'linear', or"),
        ("constant", {"name": "cyclical"}, "sgld has a schedule of its own. Leave it out"),
        ("constant_with_warmup", None, ""),
        ("linear", None, ""),
    ],
)
def test_a_warm_up_that_nothing_uses_is_refused(
    tmp_path: Path, model: PreTrainedModel, kind: str, schedule: Any, words: str
) -> None:
    args = BayesianTrainingArguments(str(tmp_path), use_cpu=True, warmup_steps=3, lr_scheduler_type=kind)
    refused = pytest.raises(ValueError, match=re.escape(f"warmup_steps=3 would be ignored: {words}"))
    with refused if words else nullcontext():
        refuse_arguments(args, SGLDConfig(schedule=schedule), model, {})


@pytest.mark.parametrize(
    ("kind", "schedule", "words"),
    [
        ("constant", None, "lr_scheduler_type='constant' takes none. Set the lr_scheduler_type that they belong to"),
        ("constant", {"name": "cyclical"}, "sgld has a schedule of its own. Leave it out"),
        ("cosine_with_restarts", None, ""),
    ],
)
def test_settings_that_no_schedule_takes_are_refused(
    tmp_path: Path, model: PreTrainedModel, kind: str, schedule: Any, words: str
) -> None:
    own = {"num_cycles": 2}
    args = BayesianTrainingArguments(str(tmp_path), use_cpu=True, lr_scheduler_kwargs=own, lr_scheduler_type=kind)
    refused = pytest.raises(ValueError, match=re.escape(f"lr_scheduler_kwargs={own} would be ignored: {words}"))
    with refused if words else nullcontext():
        refuse_arguments(args, SGLDConfig(schedule=schedule), model, {})


def test_the_defaults_are_not_refused(tmp_path: Path, model: PreTrainedModel) -> None:
    args = BayesianTrainingArguments(str(tmp_path), use_cpu=True, push_to_hub=True)
    refuse_arguments(args, MAPConfig(), model, {})
    assert refuse_types(BayesianTrainer, model, args, {}) is args


@dataclass
class SFTConfig(TrainingArguments):
    """Arguments that look like TRL's."""

    learning_rate: float = 2e-5


SFTConfig.__module__ = "trl.trainer.sft_config"


class InOrder(BayesianTrainingArguments, SFTConfig): ...


class Reversed(SFTConfig, BayesianTrainingArguments): ...


@pytest.mark.parametrize("name", ["SFTTrainer", "DPOTrainer", "RewardTrainer"])
def test_arguments_of_a_host_are_ours_and_its_config(tmp_path: Path, name: str) -> None:
    host, own = type(name, (Trainer,), {"__module__": "trl.trainer"}), name.replace("Trainer", "Config")
    trainer = type("Bayesian", (BayesianTrainerMixin, host), {})
    for given in (None, TrainingArguments(str(tmp_path)), BayesianTrainingArguments(str(tmp_path))):
        message = rf"args must be both BayesianTrainingArguments and {own}, got {type(given).__name__}: define class "
        with pytest.raises(ValueError, match=message + rf"Args\(BayesianTrainingArguments, {own}\): \.\.\., and give"):
            trainer("a-base", args=given)


def test_a_host_takes_arguments_that_are_also_its_config(tmp_path: Path, model: PreTrainedModel) -> None:
    host = type("SFTTrainer", (Trainer,), {"__module__": "trl.trainer"})
    args = InOrder(str(tmp_path))
    assert refuse_types(type("Bayesian", (BayesianTrainerMixin, host), {}), model, args, {}) is args
    assert args.learning_rate is None


def test_arguments_of_another_library_are_told_how_to_derive(tmp_path: Path, model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"got SFTConfig: define class Args\(BayesianTrainingArguments, SFTConfig\)"):
        BayesianTrainer(model, args=SFTConfig(str(tmp_path)))
    with pytest.raises(ValueError, match=r"got TrainingArguments: put BayesianTrainingArguments in its place"):
        BayesianTrainer(model, args=TrainingArguments(str(tmp_path)))


def test_arguments_with_the_defaults_of_a_host_are_refused(tmp_path: Path, model: PreTrainedModel) -> None:
    args = Reversed(str(tmp_path))
    assert args.learning_rate == 2e-5
    with pytest.raises(ValueError, match=r"Swap them: class Reversed\(BayesianTrainingArguments, SFTConfig\): \.\.\.$"):
        BayesianTrainer(model, args=args)
