"""The check of compat lists finds names and parameters that no installed library has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_bayes.core.compat import PrivateName
from tests.host_names import fault_of, found_at

APPLY = PrivateName("torch.nn.Module", "_apply", ("fn", "recurse"), "overridden")
SETTING = PrivateName("torch.nn.Module", "_made_by_init", None, "read")
LOOKED_UP = PrivateName("torch.nn.Module.state_dict", "keep_vars", None, "argument")


def test_a_name_as_it_is_installed_has_no_fault() -> None:
    assert fault_of(APPLY) == ""
    assert fault_of(SETTING, {SETTING.owner: lambda: SimpleNamespace(_made_by_init=1)}) == ""
    assert fault_of(LOOKED_UP) == ""


@pytest.mark.parametrize(
    "entry",
    [
        APPLY._replace(parameters=("fn",)),
        APPLY._replace(parameters=("recurse", "fn")),
        APPLY._replace(parameters=("fn", "recurse", "more")),
        SETTING,
        SETTING._replace(owner="torch.nn"),
        SETTING._replace(name="state"),
        LOOKED_UP._replace(name="keep_var"),
        APPLY._replace(parameters=None, use="provided"),
    ],
    ids=[
        "one less",
        "another order",
        "one more",
        "in no class",
        "in no module",
        "in the source alone",
        "in no source",
        "the host has it",
    ],
)
def test_another_name_or_signature_is_a_fault(entry: PrivateName) -> None:
    assert fault_of(entry)


def test_an_object_without_the_name_is_a_fault() -> None:
    assert fault_of(SETTING, {SETTING.owner: SimpleNamespace})


@pytest.mark.parametrize("path", ["torch.nn.NoSuchModule", "no_such_package.nn", "torch.no_such_module.Kind"])
def test_an_owner_that_is_not_installed_is_an_error(path: str) -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        found_at(path)
