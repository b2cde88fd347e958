from __future__ import annotations

from functools import partial

import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from hf_bayes.chains.sampling import sample
from hf_bayes.core.schedules import Cyclical
from hf_bayes.methods.averaging.snapshot import SnapshotConfig
from tests.methods.averaging.regression import BATCHES, RATE, START, N, energy, torch_sgd

CYCLE = 10


def draws(config: SnapshotConfig) -> torch.Tensor:
    return sample(
        energy, START, config, num_steps=4 * CYCLE, learning_rate=RATE, num_data=N, batches=BATCHES, thin=CYCLE
    ).draws


def test_members_are_cycle_ends_of_torch_sgd_with_warm_restarts() -> None:
    path = torch_sgd(4 * CYCLE, momentum=0.9, schedule=partial(CosineAnnealingWarmRestarts, T_0=CYCLE))
    members = path[CYCLE - 1 :: CYCLE].transpose(0, 1)
    assert (draws(SnapshotConfig()) - members).abs().max() < 1e-12
    assert (draws(SnapshotConfig(schedule=Cyclical())) - members).abs().max() > 1e-3  # l_0 C(t)^2 is another cycle
