from __future__ import annotations

import inspect

import pytest
from transformers import Trainer

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.compat import OVERRIDDEN
from hf_bayes.training.private_hooks import PrivateHooks
from hf_bayes.training.trainer import BayesianTrainer, BayesianTrainerMixin
from tests import runs


def private_hooks(kind: type) -> set[str]:
    return {name for name in vars(kind) if name[0] == "_" != name[1] and hasattr(Trainer, name)}


def test_private_hooks_are_overridden_here_and_nowhere_else() -> None:
    assert private_hooks(PrivateHooks) == set(OVERRIDDEN)
    assert not private_hooks(BayesianTrainerMixin) | private_hooks(BayesianTrainer)


def test_an_override_has_the_parameters_of_its_hook() -> None:
    for name, parameters in OVERRIDDEN.items():
        assert tuple(inspect.signature(getattr(PrivateHooks, name)).parameters) == parameters


def test_a_checkpoint_before_a_run_is_refused_in_words(tmp_path) -> None:
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2))
    with pytest.raises(ValueError, match=r"call train\(\) first"):
        trainer._load_from_checkpoint("checkpoint-1")
