from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.settings_of_processes import meet
from tests import runs


def mesh(**others: Any) -> Any:
    """Return the mesh of two processes, the second with 5 rows of its own and with ``others``."""

    def share(own: Any) -> list[Any]:
        return [own, {**own, **others} if isinstance(own, dict) else 5]

    return SimpleNamespace(rank=1, share=share)


def host(directory: Path) -> Any:
    args = runs.arguments(directory, gradient_accumulation_steps=3)
    return SimpleNamespace(args=args, eval_dataset={"dev": [1, 2], "test": None}, train_dataset=[1] * 9)


def test_processes_learn_how_many_rows_each_has(tmp_path: Path) -> None:
    strata = meet(host(tmp_path), SGHMCConfig(), mesh())
    assert strata.sizes == (9, 5)
    assert strata.rank == 1


@pytest.mark.parametrize("name", ["learning_rate", "seed", "method", "rows of eval_dataset dev"])
def test_a_setting_of_one_process_alone_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"process 1 has {name}='other', process 0 "):
        meet(host(tmp_path), SGHMCConfig(), mesh(**{name: "other"}))
