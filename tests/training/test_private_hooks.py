from __future__ import annotations

import inspect

import pytest
from transformers import Trainer

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
