from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers.dynamic_module_utils
import transformers.tokenization_utils_base
from huggingface_hub import HfApi
from huggingface_hub.utils import _validators
from peft import get_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer
from peft.utils import ModulesToSaveWrapper, constants
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import hub as transformers_hub

import hf_bayes.posteriors
from hf_bayes.posteriors import compat
from hf_bayes.posteriors.hub import DOWNLOAD
from hf_bayes.posteriors.storage.manifest import PREFIX
from tests import tiny_models as models

HOSTS = ("huggingface_hub", "peft", "safetensors", "transformers")


def test_names_of_adapter_files_are_those_of_peft() -> None:
    assert compat.ADAPTER_CONFIG == constants.CONFIG_NAME
    assert compat.ADAPTER == constants.SAFETENSORS_WEIGHTS_NAME


def test_factors_and_wrappers_have_peft_s_names() -> None:
    assert set(compat.LORA_FACTORS) == {name for name in LoraLayer.adapter_layer_names if name[-1] in "AB"}
    assert hasattr(ModulesToSaveWrapper(torch.nn.Linear(1, 1), "a"), compat.SAVED_MODULES)


def test_peft_puts_its_prefix_and_name_around_a_parameter() -> None:
    model = models.with_lora(models.tiny_llama())
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all(name.startswith(compat.MODEL_PREFIX) for name in names)
    assert all(f".{compat.ADAPTER_NAME}." in name for name in names)
    keys = get_peft_model_state_dict(model)
    assert [name.replace(f".{compat.ADAPTER_NAME}", "") for name in names] == list(keys)


def test_sidecars_have_the_file_names_of_transformers() -> None:
    assert compat.GENERATION_CONFIG == GENERATION_CONFIG_NAME
    assert compat.CHAT_TEMPLATES == (
        transformers_hub.CHAT_TEMPLATE_FILE,
        transformers_hub.LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
        transformers_hub.CHAT_TEMPLATE_DIR,
    )


def test_configs_have_the_keys_of_transformers() -> None:
    source = inspect.getsource(transformers.tokenization_utils_base)
    assert all(f'"{key}" in tokenizer_config' in source for key in compat.FURTHER_FILES)
    assert f'"{compat.CODE_REFERENCES}"' in inspect.getsource(transformers.dynamic_module_utils)
    reference = inspect.signature(transformers.dynamic_module_utils.get_class_from_dynamic_module)
    assert list(reference.parameters)[:2] == ["class_reference", "pretrained_model_name_or_path"]


def test_transformers_uploads_no_checkpoints_or_pending_saves() -> None:
    assert f"{PREFIX_CHECKPOINT_DIR}-*" == compat.CHECKPOINT_FOLDERS
    assert PREFIX.startswith("_")
    assert '"_*"' in inspect.getsource(Trainer.push_to_hub)


def test_transformers_saves_the_metadata_that_it_requires(tmp_path: Path) -> None:
    models.tiny_llama().save_pretrained(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == compat.SAFETENSORS_METADATA


@pytest.mark.parametrize(
    ("name", "is_id"), [("user/name", True), ("gpt2", True), ("a/b/c", False), ("two words", False), ("", False)]
)
def test_the_hub_decides_what_a_repository_id_is(name: str, is_id: bool) -> None:
    assert list(inspect.signature(_validators.validate_repo_id).parameters) == ["repo_id"]
    assert compat.is_repo_id(name) is is_id


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (huggingface_hub.snapshot_download, {*DOWNLOAD, "repo_id", "allow_patterns", "ignore_patterns", "revision"}),
        (HfApi.create_repo, {"repo_id", "private", "exist_ok"}),
        (HfApi.create_branch, {"repo_id", "branch", "exist_ok"}),
        (
            HfApi.upload_folder,
            {"repo_id", "folder_path", "allow_patterns", "delete_patterns", "revision", "commit_message"},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_hub_s_functions_take_our_options(function: object, options: set[str]) -> None:
    assert options <= set(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_private_names_of_hosts_are_imported_in_compat_only() -> None:
    root = Path(hf_bayes.posteriors.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in HOSTS:
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                if any(name.startswith("_") for name in names):
                    found.add(path.relative_to(root).as_posix())
    assert found == {"compat.py"}
