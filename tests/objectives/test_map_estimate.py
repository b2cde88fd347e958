from __future__ import annotations

import torch
from torch import Tensor
from transformers import default_data_collator

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.map_comparison import map_of_run
from tests import runs


def test_a_map_estimate_follows_the_posteriors_own_energy(tmp_path):
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=1, prior_std=0.5, warm_start_learning_rate=0.02),
        per_device_train_batch_size=10,
        max_steps=300,
        map_updates=300,
    )
    trainer.train()
    start, point = trainer.posterior.representative[None], map_of_run(trainer.posterior, trainer.active)
    batch = default_data_collator(runs.token_rows())

    def energy(theta: Tensor, prior_weight: float) -> tuple[float, Tensor]:
        leaf = theta.detach().requires_grad_()
        value = trainer.bayesian(**batch, theta=leaf, folded=False).loss.sum()
        value = value - prior_weight * trainer.active.prior.log_prob(leaf).sum()
        return float(value.detach()), torch.autograd.grad(value, leaf)[0]

    before, after = energy(start, 1.0), energy(point, 1.0)
    assert after[0] < before[0]
    assert after[1].norm() < 0.05 * before[1].norm()
    # at the maximum the two forces cancel; of a prior with half the weight (the twin) half its force would be left, and
    # the two sides would change places
    assert after[1].norm() < energy(point, 0.5)[1].norm()
