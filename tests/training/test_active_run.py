from __future__ import annotations

import pytest

from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.registry import METHODS
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests.tiny_models import tiny_llama, with_lora
from tests.training.trained import StopAfter


@pytest.mark.parametrize(("step", "draws"), [(1, 1), (4, 1), (5, 2)])
def test_a_callback_may_stop_the_run(tmp_path, step, draws):
    """Draws are due after updates 4, 5 and 6; what was not reached is not made up."""
    callback = StopAfter(step)
    config = SGHMCConfig(num_chains=2, draws_per_chain=3)
    trainer = runs.trainer(tmp_path, config, callbacks=[callback])
    assert trainer.train().global_step == step
    assert callback.seen == [1e-2] * step
    assert trainer.posterior.config.num_members == 2 * draws


@pytest.mark.parametrize("name", ["sghmc", "mean_field", "hmc"])
def test_a_run_stopped_in_its_warm_start_has_members(tmp_path, name):
    config = METHODS[name](num_chains=2, warm_start_steps=3)
    trainer = runs.trainer(tmp_path, config, callbacks=[StopAfter(2)])
    trainer.train()
    assert trainer.posterior.sample(2).isfinite().all()


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({"layers_to_transform": [1]}, {}, None),
        ({}, {}, "stores nothing: no layers run before all random parameters"),
        ({"layers_to_transform": [1], "lora_dropout": 0.1}, {}, "stores nothing: dropout changes the outputs"),
        ({}, {"trunk_memory_gib": 0.0}, None),
    ],
)
def test_a_memory_that_stores_nothing_is_said(tmp_path, caplog, options, changes, reason):
    changes = {"trunk_memory_gib": 0.1, "minibatch": "shared"} | changes
    trainer = runs.trainer(tmp_path, MAPConfig(), model=with_lora(tiny_llama(), **options), **changes)
    trainer.train()
    assert ("stores nothing" in caplog.text) == (reason is not None)
    assert reason is None or reason in caplog.text
