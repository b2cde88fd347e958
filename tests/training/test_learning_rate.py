from __future__ import annotations

import math

import pytest

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests.training.trained import StopAfter


def test_schedules_of_transformers_drive_the_step_size(tmp_path):
    callback = StopAfter(99)
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=1),
        callbacks=[callback],
        max_steps=8,
        lr_scheduler_type="cosine_with_restarts",
        lr_scheduler_kwargs={"num_cycles": 2},
    )
    trainer.train()
    # on_step_end sees the step size of the next update
    expected = [1e-2 * 0.5 * (1 + math.cos(math.pi * (2 * s / 8 % 1))) for s in range(1, 8)] + [0.0]
    assert callback.seen == pytest.approx(expected, abs=1e-9)
    laws = [entry["kinetic_temperature_law/chain_0"] for entry in trainer.state.log_history if "loss" in entry]
    # beta_t = 1 - (1 - beta) sqrt(l_t / l_0): friction is fixed
    assert laws[2] == pytest.approx(2 / (2 - 0.1 * math.sqrt(0.5)), rel=1e-6)


@pytest.mark.parametrize(("lr_end", "step"), [(-0.01, 5), (-1.0, 2)])
def test_a_rate_outside_0_and_its_peak_is_refused(tmp_path, lr_end, step):
    schedule = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": lr_end}}
    trainer = runs.trainer(tmp_path, SGHMCConfig(), max_steps=6, **schedule)
    with pytest.raises(ValueError, match=rf"at step {step}: it must stay within 0 and learning_rate=0\.01, the peak"):
        trainer.train()
    assert trainer.active is None
