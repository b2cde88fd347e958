"""A MAP estimate by AdamW on the rows of a trainer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.adamw_estimate import adamw_estimate
from hf_bayes.training.trainer_host import TrainerHost
from tests import runs
from tests.tiny_models import tiny_llama, with_lora


def test_an_estimate_has_less_energy_and_no_dropout(tmp_path: Path) -> None:
    found: list[Tensor] = []
    for dropout in (0.0, 0.3):
        torch.manual_seed(0)
        run = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), model=with_lora(tiny_llama(), lora_dropout=dropout))
        active, start = runs.started(run), run.setup.start[None]
        given = TrainerHost(run), run.setup, run.rows, active.method, start, active.problem
        found.append(adamw_estimate(*given, learning_rate=1e-2, num_updates=30, title=""))
        at_both = torch.cat([start, found[-1]])
        batches = next(iter(run.rows.shared_updates()))
        run.bayesian.eval()
        log_lik = active.objective.evaluate(at_both, batches, gradient=False).log_lik
        energy = -log_lik - active.problem.prior.log_prob(at_both)
        assert energy[1] < energy[0]
    assert torch.equal(*found)
