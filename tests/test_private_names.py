"""Every private name of a host library that the package reads or overrides stands in the list of that host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.private_names import STANDARD_LIBRARY, host_names, imports, listed, lists_of, unlisted

PACKAGE = Path(__file__).parents[1] / "hf_bayes"
LISTS = lists_of(PACKAGE)
LISTED = set().union(*(listed(names) for names in LISTS.values()))
PLANTED = """
import torch
from torch import nn
from torch._utils import _flatten_dense_tensors


class Above:
    def _apply(self, fn): ...


class Own:
    def _evaluate(self):
        return self._evaluate()


class Layer(Above, nn.Module):
    _own: int = 0

    def _save_to_state_dict(self):
        return self._own, self._parameters

    def forward(self, model):
        self._own = torch._own
        hidden = getattr(model, "_hidden_name", None)
        return model._keys_to_ignore_on_save, hidden, "_no_split_modules"
"""
EXPECTED = {
    "_utils": 4,
    "_flatten_dense_tensors": 4,
    "_apply": 8,
    "_save_to_state_dict": 19,
    "_parameters": 20,
    "_own": 23,
    "_hidden_name": 24,
    "_keys_to_ignore_on_save": 25,
    "_no_split_modules": 25,
}
"""Each private name of a host in ``PLANTED`` and its line."""


@pytest.fixture(scope="module")
def everything() -> dict[str, set[str]]:
    """The scan of the package without any list."""
    return unlisted(PACKAGE)


def test_every_private_name_of_a_host_is_listed(everything: dict[str, set[str]]) -> None:
    assert {name: places for name, places in everything.items() if name not in LISTED} == {}


def test_each_host_has_one_module() -> None:
    hosts = {path: {entry.owner.partition(".")[0] for entry in names} for path, names in LISTS.items()}
    assert hosts == {
        "core/compat.py": {"torch"},
        "members/compat/lm_eval.py": {"lm_eval"},
        "members/compat/peft.py": {"peft"},
        "members/compat/transformers_names.py": {"transformers"},
        "members/compat/trl.py": {"trl"},
        "metrics/compat.py": {"evaluate"},
        "posteriors/compat.py": {"huggingface_hub"},
    }


def test_a_host_s_module_imports_private_names_of_this_host_only() -> None:
    assert imports(PACKAGE) == {"core/compat.py": {"torch"}, "posteriors/compat.py": {"huggingface_hub"}}


def test_a_planted_private_name_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "inside"
    folder.mkdir(parents=True)
    (folder / "layer.py").write_text(PLANTED, encoding="utf-8")
    places = {name: {f"deep/inside/layer.py:{line}"} for name, line in EXPECTED.items()}
    assert unlisted(tmp_path) == places
    assert unlisted(tmp_path, {"_apply"}) == {name: at for name, at in places.items() if name != "_apply"}


@pytest.mark.parametrize(
    "name", ["_version", "_standard_gamma", "_C", "_attn_implementation", "_get_train_sampler", "_info", "_batch_size"]
)
def test_a_name_that_leaves_the_lists_is_found(name: str, everything: dict[str, set[str]]) -> None:
    assert name in LISTED
    assert name in everything


def test_the_installed_classes_of_hosts_are_read() -> None:
    assert {"_parameters", "_version", "_supports_sdpa", "_name_or_path", "_save_checkpoint"} <= host_names()


def test_a_name_of_the_standard_library_is_no_host_s() -> None:
    assert all(hasattr(kind(), name) for name, kind in STANDARD_LIBRARY.items())
