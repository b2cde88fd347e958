from __future__ import annotations

import inspect
import json
from pathlib import Path

import torch
import transformers.dynamic_module_utils
import transformers.tokenization_utils_base
from peft import get_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer
from peft.utils import ModulesToSaveWrapper, constants
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import hub as transformers_hub

from hf_bayes.posteriors import file_formats
from hf_bayes.posteriors.storage.manifest import PREFIX
from tests import tiny_models as models


def test_names_of_adapter_files_are_those_of_peft() -> None:
    assert file_formats.ADAPTER_CONFIG == constants.CONFIG_NAME
    assert file_formats.ADAPTER == constants.SAFETENSORS_WEIGHTS_NAME


def test_factors_and_wrappers_have_peft_s_names() -> None:
    assert set(file_formats.LORA_FACTORS) == {name for name in LoraLayer.adapter_layer_names if name[-1] in "AB"}
    assert hasattr(ModulesToSaveWrapper(torch.nn.Linear(1, 1), "a"), file_formats.SAVED_MODULES)


def test_peft_puts_its_prefix_and_name_around_a_parameter() -> None:
    model = models.with_lora(models.tiny_llama())
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all(name.startswith(file_formats.MODEL_PREFIX) for name in names)
    assert all(f".{file_formats.ADAPTER_NAME}." in name for name in names)
    keys = get_peft_model_state_dict(model)
    assert [name.replace(f".{file_formats.ADAPTER_NAME}", "") for name in names] == list(keys)


def test_sidecars_have_the_file_names_of_transformers() -> None:
    assert file_formats.GENERATION_CONFIG == GENERATION_CONFIG_NAME
    assert file_formats.CHAT_TEMPLATES == (
        transformers_hub.CHAT_TEMPLATE_FILE,
        transformers_hub.LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
        transformers_hub.CHAT_TEMPLATE_DIR,
    )


def test_configs_have_the_keys_of_transformers() -> None:
    source = inspect.getsource(transformers.tokenization_utils_base)
    assert all(f'"{key}" in tokenizer_config' in source for key in file_formats.FURTHER_FILES)
    assert f'"{file_formats.CODE_REFERENCES}"' in inspect.getsource(transformers.dynamic_module_utils)
    reference = inspect.signature(transformers.dynamic_module_utils.get_class_from_dynamic_module)
    assert list(reference.parameters)[:2] == ["class_reference", "pretrained_model_name_or_path"]


def test_transformers_uploads_no_checkpoints_or_pending_saves() -> None:
    assert f"{PREFIX_CHECKPOINT_DIR}-*" == file_formats.CHECKPOINT_FOLDERS
    assert PREFIX.startswith("_")
    assert '"_*"' in inspect.getsource(Trainer.push_to_hub)


def test_transformers_saves_the_metadata_that_it_requires(tmp_path: Path) -> None:
    models.tiny_llama().save_pretrained(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == file_formats.SAFETENSORS_METADATA
