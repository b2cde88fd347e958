from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.checks import memory as memory_check
from hf_bayes.training.checks.memory import NUMBERS_PER_PARAMETER, require_memory
from tests import runs

CPU = torch.device("cpu")

NEEDED = (NUMBERS_PER_PARAMETER + 1) * 1000 * 4
"""Bytes of a chain of 1,000 parameters in float32, with its draw."""


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the bytes that are free."""
    return lambda amount: monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=amount))


def test_chains_that_fit_to_the_byte_are_allowed(free: Any) -> None:
    method = SGHMCConfig(num_chains=8, draws_per_chain=3)
    free((NUMBERS_PER_PARAMETER + 3) * 8 * 1000 * 4)
    require_memory(1000, 8, method, CPU, 4)
    with pytest.raises(ValueError, match=r"8 chains of 1,001 random parameters and 3 draws"):
        require_memory(1001, 8, method, CPU, 4)


def test_chains_that_do_not_fit_are_refused_before_they_are_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1,000,000,000 chains .* GiB, and .* free on the cpu: reduce num_chains"):
        runs.trainer(tmp_path, SGHMCConfig(num_chains=10**9))


def test_chains_of_an_accelerator_are_held_against_its_memory(free: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (NUMBERS_PER_PARAMETER * 4000, 10**9))
    free(4000)  # enough for the draw
    require_memory(1000, 1, SGHMCConfig(num_chains=1), torch.device("cuda"), 4)
    with pytest.raises(ValueError, match="free on the cuda"):
        require_memory(1001, 1, SGHMCConfig(num_chains=1), torch.device("cuda"), 4)
    free(3999)
    with pytest.raises(ValueError, match="free on the cpu"):
        require_memory(1000, 1, SGHMCConfig(num_chains=1), torch.device("cuda"), 4)


LIMITS = {
    "": ("0::/", "memory.max", "memory.current"),
    "memory": ("4:memory:/", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""The versions of Linux's control groups: folder -> line of the process, file of the limit, file of what is used."""


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put this process into a group of a version, and its limit into another folder of the same tree."""
    monkeypatch.setattr(memory_check, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory_check, "OWN_GROUPS", tmp_path / "own")

    def put(version: str, path: str, limited: str, limit: str) -> None:
        line, most, used = LIMITS[version]
        (tmp_path / "own").write_text(f"5:devices:/\n{line}{path}\n")
        folder = tmp_path / "groups" / version / limited
        folder.mkdir(parents=True, exist_ok=True)
        (folder / most).write_text(f"{limit}\n")
        (folder / used).write_text("7000\n")
        (folder / "memory.stat").write_text("anon 4000\nactive_file 1000\ninactive_file 2000\nshmem 10\n")

    return put


@pytest.mark.parametrize("version", LIMITS)
@pytest.mark.parametrize("limited", ["jobs/1", "jobs", ""])  # the group of the process, one around it, a container's
def test_the_limit_of_a_container_counts(group: Any, free: Any, version: str, limited: str) -> None:
    free(10**9)
    group(version, "jobs/1", limited, str(NEEDED + 4000))  # of which 7000 are used, and 3000 of these count as free
    require_memory(1000, 1, SGHMCConfig(num_chains=1), CPU, 4)
    with pytest.raises(ValueError, match="free on the cpu"):
        require_memory(1001, 1, SGHMCConfig(num_chains=1), CPU, 4)


@pytest.mark.parametrize(("version", "limit"), [("", "max"), ("memory", "9223372036854771712")])
def test_a_group_without_a_limit_leaves_the_machine(group: Any, free: Any, version: str, limit: str) -> None:
    group(version, "", "", limit)
    free(NEEDED)
    require_memory(1000, 1, SGHMCConfig(num_chains=1), CPU, 4)
    with pytest.raises(ValueError, match="free on the cpu"):
        require_memory(1001, 1, SGHMCConfig(num_chains=1), CPU, 4)


def test_a_system_without_groups_has_no_limit(tmp_path: Path) -> None:
    assert memory_check._group_bytes(tmp_path, tmp_path / "none") == []
