from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests.tiny_models import tiny_llama, with_lora


@pytest.mark.parametrize("changes", [{"num_chains": 3}, {"num_chains": 3, "prior_mean": "initial"}])
def test_chains_start_in_different_places_around_the_model(tmp_path, changes):
    trainer = runs.trainer(tmp_path, SGHMCConfig(init_jitter=0.1, **changes))
    distance = (trainer.setup.origin - trainer.setup.start).norm(dim=1) / trainer.setup.start.norm()
    assert ((distance > 0.05) & (distance < 0.2)).all()
    assert all(not torch.equal(a, b) for a, b in pairwise(trainer.setup.origin))


def test_a_model_that_another_trainer_holds_is_refused(tmp_path):
    model = with_lora(tiny_llama())
    first = runs.trainer(tmp_path / "first", SGHMCConfig(), model=model)
    with pytest.raises(ValueError, match="attached already: detach"):
        runs.trainer(tmp_path / "second", SGHMCConfig(), model=model)
    first.bayesian.detach()
    runs.trainer(tmp_path / "second", SGHMCConfig(), model=model).bayesian.detach()
