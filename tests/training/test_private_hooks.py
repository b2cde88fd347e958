from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, default_data_collator

from hf_bayes.members.compat.transformers_names import NAMES
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.private_hooks import PrivateHooks
from hf_bayes.training.trainer import BayesianTrainer, BayesianTrainerMixin
from tests import runs
from tests.host_names import parameters_of
from tests.training.trained import Stream

OVERRIDDEN = {
    entry.name: entry.parameters
    for entry in NAMES
    if entry.owner == "transformers.Trainer" and entry.use == "overridden"
}


def private_hooks(kind: type) -> set[str]:
    return {name for name in vars(kind) if name[0] == "_" != name[1] and hasattr(Trainer, name)}


def test_private_hooks_are_overridden_here_and_nowhere_else() -> None:
    assert private_hooks(PrivateHooks) == set(OVERRIDDEN)
    assert not private_hooks(BayesianTrainerMixin) | private_hooks(BayesianTrainer)


def test_an_override_has_the_parameters_of_its_hook() -> None:
    for name, parameters in OVERRIDDEN.items():
        assert parameters_of(getattr(PrivateHooks, name)) == parameters


def test_a_checkpoint_before_a_run_is_refused_in_words(tmp_path) -> None:
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2))
    with pytest.raises(ValueError, match=r"call train\(\) first"):
        trainer._load_from_checkpoint("checkpoint-1")


def test_every_override_takes_what_trainer_passes() -> None:
    for name, ours in {**vars(PrivateHooks), **vars(BayesianTrainerMixin)}.items():
        stock = getattr(Trainer, name, None)
        if name.startswith("__") or not callable(stock) or not inspect.isfunction(ours):
            continue
        own = inspect.signature(ours).parameters
        kinds = {parameter.kind for parameter in own.values()}
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds or inspect.Parameter.VAR_POSITIONAL in kinds
        for parameter in inspect.signature(stock).parameters:
            assert takes_all or parameter in own, f"{name} lacks {parameter}"


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Hide tokens by three generators: torch's, NumPy's and Python's."""
    batch = default_data_collator(rows)
    hidden = torch.rand(batch["input_ids"].shape) < 0.3 * random.random() + 0.3 * float(np.random.rand())
    return batch | {"input_ids": torch.where(hidden, 5, batch["input_ids"])}


class Hiding(Dataset):
    """Rows that are other rows whenever they are read."""

    rows = runs.token_rows(10)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        tokens = [5 if random.random() < 0.1 else token for token in self.rows[row]["input_ids"]]
        return self.rows[row] | {"input_ids": tokens}


def ended(folder: Path, checkpoint: Path | None = None, **changes: Any) -> Any:
    seed = 9 if checkpoint else 8  # a resumed run begins with other states of the generators
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    method = SGHMCConfig(num_chains=2, draws_per_chain=2, temperature=0.01)
    fields = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None, "max_steps": 10, **changes}
    trainer = runs.trainer(folder, method, collator=collate, **fields)
    trainer.train(None if checkpoint is None else str(checkpoint))
    return trainer.posterior


def trained(*where: Path, **changes: Any) -> Any:
    return ended(*where, **changes).approximation


def test_a_collator_that_draws_resumes_within_an_epoch(tmp_path) -> None:
    whole = trained(tmp_path / "whole")
    for update in (3, 5, 7):  # an epoch has five
        assert runs.equal(trained(tmp_path / "rest", tmp_path / f"whole/checkpoint-{update}"), whole)


def test_a_collator_that_draws_resumes_with_a_probe(tmp_path) -> None:
    """The probe is read at its first use: a resumed run reads it again."""
    whole = ended(tmp_path / "whole", probe_steps=2)
    for update in (3, 4):
        rest = ended(tmp_path / "rest", tmp_path / f"whole/checkpoint-{update}", probe_steps=2)
        assert runs.equal(rest.approximation, whole.approximation)
        assert rest.config.diagnostics == whole.config.diagnostics


def test_the_interval_of_the_probe_changes_no_rows(tmp_path) -> None:
    assert runs.equal(*(trained(tmp_path / f"{steps}", probe_steps=steps) for steps in (2, 5)))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_collator_that_draws_resumes_in_a_stream(tmp_path, accumulation) -> None:
    """With accumulation the last two of a pass of ten rows are collated, and belong to no update."""
    stream = {"train": Stream(runs.token_rows(10)), "minibatch": "shared", "num_data": 70.0}
    settings = {**stream, "max_steps": 6, "gradient_accumulation_steps": accumulation}
    whole = trained(tmp_path / "whole", **settings)
    for update in (2, 5):
        assert runs.equal(trained(tmp_path / "rest", tmp_path / f"whole/checkpoint-{update}", **settings), whole)


@pytest.mark.parametrize("persistent", [False, True])
def test_rows_that_workers_draw_resume_bitwise(tmp_path, persistent) -> None:
    settings = {"train": Hiding(), "max_steps": 7, "dataloader_persistent_workers": persistent}
    whole = trained(tmp_path / "whole", dataloader_num_workers=2, **settings)
    for update, workers in ((3, 2), (5, 1)):  # an epoch has five
        checkpoint = tmp_path / f"whole/checkpoint-{update}"
        assert runs.equal(trained(tmp_path / "rest", checkpoint, dataloader_num_workers=workers, **settings), whole)
