from __future__ import annotations

import inspect

import pytest
import torch
from transformers import Trainer, default_data_collator

from hf_bayes.members.compat import transformers as compat
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.private_hooks import PrivateHooks
from hf_bayes.training.trainer import BayesianTrainer, BayesianTrainerMixin
from tests import runs
from tests.host_names import parameters_of

OVERRIDDEN = {
    entry.name: entry.parameters
    for entry in compat.NAMES
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


def test_a_collator_that_draws_resumes_within_an_epoch(tmp_path) -> None:
    def collate(rows):
        batch = default_data_collator(rows)
        hidden = torch.rand(batch["input_ids"].shape) < 0.3
        return batch | {"input_ids": torch.where(hidden, 5, batch["input_ids"])}

    def run(folder, checkpoint=None, **changes):
        method = SGHMCConfig(num_chains=2, draws_per_chain=2, temperature=0.01)
        trainer = runs.trainer(folder, method, collator=collate, max_steps=10, **changes)
        trainer.train(checkpoint)
        return trainer.posterior.approximation

    whole = run(tmp_path / "whole", save_strategy="steps", save_steps=1, save_total_limit=None)
    for update in (3, 5, 7):  # an epoch has five
        assert runs.equal(run(tmp_path / "rest", str(tmp_path / f"whole/checkpoint-{update}")), whole)
