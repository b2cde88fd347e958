from __future__ import annotations

import inspect

import huggingface_hub
import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import _validators

from hf_bayes.core.compat import PrivateName
from hf_bayes.posteriors import compat
from hf_bayes.posteriors.hub import Download
from tests.host_names import fault_of, label


@pytest.mark.parametrize("entry", compat.NAMES, ids=label)
def test_the_hub_has_the_private_name(entry: PrivateName) -> None:
    assert fault_of(entry) == ""


@pytest.mark.parametrize(
    ("name", "is_id"), [("user/name", True), ("gpt2", True), ("a/b/c", False), ("two words", False), ("", False)]
)
def test_the_hub_decides_what_a_repository_id_is(name: str, is_id: bool) -> None:
    assert list(inspect.signature(_validators.validate_repo_id).parameters) == ["repo_id"]
    assert compat.is_repo_id(name) is is_id


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (
            huggingface_hub.snapshot_download,
            {*Download.__annotations__, "repo_id", "allow_patterns", "ignore_patterns", "revision"},
        ),
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
