from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_bayes.members.mesh import ChainMesh
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.penalty import PenaltyConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.checks.rows import (
    meet,
    refuse_other_heldout_rows,
    refuse_other_rows,
    refuse_other_settings,
    refuse_other_weights,
    require_batches,
    require_heldout,
    require_names_of_sets,
    require_training_rows,
)
from tests import runs

HELDOUT = LaplaceConfig(fit_prior="heldout")


def test_a_stream_names_every_setting_that_it_needs(tmp_path: Path) -> None:
    stream = (row for row in runs.token_rows(2))
    fine = runs.arguments(tmp_path, num_data=7, minibatch="shared")
    require_training_rows(stream, fine, SGHMCConfig())
    with pytest.raises(ValueError, match=r"\(generator\) is a stream: pass num_data=.*; set max_steps.*; set minib"):
        require_training_rows(stream, runs.arguments(tmp_path, max_steps=-1), SGHMCConfig())
    with pytest.raises(ValueError, match="is a stream: hmc needs all rows in every move: materialise it"):
        require_training_rows(stream, fine, HMCConfig())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "got None: give eval_dataset="),
        ({"test": [1, 2]}, r"none of its data sets \(test\) is named 'heldout'"),
        ([1], "needs at least 2, got 1"),
        (iter([1, 2]), "is a stream: materialise it"),
    ],
)
def test_held_out_rows_are_two_or_more_that_can_be_counted(dataset: Any, message: str) -> None:
    require_heldout([1, 2], HELDOUT, unit="example")
    require_heldout({"heldout": [1, 2], "test": [1]}, HELDOUT, unit="example")
    with pytest.raises(ValueError, match=f"^laplace with .* fits by the rows of eval_dataset.*{message}"):
        require_heldout(dataset, HELDOUT, unit="example")


def test_methods_that_compare_batches_need_several() -> None:
    penalty = PenaltyConfig()
    least = penalty.requirements.min_batches
    assert least >= 2
    require_batches(SGHMCConfig(), 1)
    require_batches(penalty, least)
    with pytest.raises(ValueError, match=rf"penalty needs at least {least} batches per update .* got {least - 1} "):
        require_batches(penalty, least - 1)


def test_processes_that_differ_are_named_with_the_setting() -> None:
    refuse_other_settings([{"seed": 1}, {"seed": 1}])
    with pytest.raises(ValueError, match="process 1 has seed=2, process 0 1: with private_rows only the rows"):
        refuse_other_settings([{"seed": 1}, {"seed": 2}])
    with pytest.raises(ValueError, match="process 2 has data_seed=3, process 0 None"):
        refuse_other_settings([{"seed": 1}, {"seed": 1}, {"seed": 1, "data_seed": 3}])
    refuse_other_rows([{"rows": 4}, {"rows": 4}])
    with pytest.raises(ValueError, match=r"process 1 has another train_dataset .* \(rows: got 5, expected 4\)"):
        refuse_other_rows([{"rows": 4}, {"rows": 5}])
    refuse_other_heldout_rows([{"num_rows": 4}, {"num_rows": 4}])
    with pytest.raises(ValueError, match=r"process 1 has another eval_dataset .* \(num_rows: got 5, expected 4\)"):
        refuse_other_heldout_rows([{"num_rows": 4}, {"num_rows": 5}])


def test_other_frozen_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mesh(*found: str) -> Any:
        return SimpleNamespace(num_processes=len(found), share=lambda own: list(found))

    model: Any = SimpleNamespace(model=None, layout=None)
    monkeypatch.setattr("hf_bayes.models.loading.base_model.fingerprint_weights", lambda *_: "own")
    refuse_other_weights(model, mesh("a"))
    refuse_other_weights(model, mesh("a", "a"))
    with pytest.raises(ValueError, match=r"process 1 holds other frozen weights .* \(fingerprint b, expected a\)"):
        refuse_other_weights(model, mesh("a", "b"))


def test_a_prior_of_one_process_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def share(self: ChainMesh, own: Any) -> list[Any]:
        return [own, "b" * 64]

    monkeypatch.setattr(ChainMesh, "share", share)
    with pytest.raises(ValueError, match=r"process 1 has another prior= .*\(got posterior b{12}, expected none\)"):
        runs.trainer(tmp_path, SGHMCConfig())


def mesh_of_two(**others: Any) -> Any:
    """Return the mesh of two processes, the second with 5 rows of its own and with ``others``."""

    def share(own: Any) -> list[Any]:
        return [own, {**own, **others} if isinstance(own, dict) else 5]

    return SimpleNamespace(rank=1, share=share)


def host_of_nine_rows(directory: Path) -> Any:
    args = runs.arguments(directory, gradient_accumulation_steps=3)
    return SimpleNamespace(args=args, eval_sets={"dev": [1, 2], "test": None}, train_dataset=[1] * 9)


def test_processes_learn_how_many_rows_each_has(tmp_path: Path) -> None:
    strata = meet(host_of_nine_rows(tmp_path), SGHMCConfig(), mesh_of_two())
    assert strata.sizes == (9, 5)
    assert strata.rank == 1


def test_names_of_held_out_data_sets_are_texts() -> None:
    require_names_of_sets(None)
    require_names_of_sets({"near": [1], "far": [2]})
    with pytest.raises(ValueError, match=r"with the names \[1\], expected texts: .* Write \{'1': \.\.\.\}"):
        require_names_of_sets({1: [1], "far": [2]})


NAMES = ["learning_rate", "seed", "lr_scheduler_type", "warmup_steps", "method", "rows of eval_dataset dev"]


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_of_one_process_alone_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"process 1 has {name}='other', process 0 (?!None)"):
        meet(host_of_nine_rows(tmp_path), SGHMCConfig(), mesh_of_two(**{name: "other"}))
