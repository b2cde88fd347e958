from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.memory_check import NUMBERS_PER_PARAMETER, require_memory
from tests import runs

CPU = torch.device("cpu")


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
