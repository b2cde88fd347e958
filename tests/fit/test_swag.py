from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from hf_bayes import BayesianModelForCausalLM, Posterior, fit_swag
from hf_bayes.chains.sampling import SampleResult, sample
from hf_bayes.distributions.approximations import Draws
from hf_bayes.methods.averaging.swag import SWAGConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests.faults import posteriors
from tests.methods.averaging.regression import BATCHES, RATE, START, N, energy
from tests.posteriors.test_abstention import RULE
from tests.posteriors.test_config import CALIBRATED
from tests.runs import token_rows, trainer
from tests.tiny_models import batch, tiny_llama

INTERVAL, BURN_IN, NUM_STEPS = 3, 10, 60


def run(rank: int) -> SampleResult:
    config = SWAGConfig(optimizer="sgd", momentum=0.8, collect_every=INTERVAL, rank=rank)
    return sample(
        energy, START, config, num_steps=NUM_STEPS, learning_rate=RATE, num_data=N, batches=BATCHES, burn_in=BURN_IN
    )


@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_draws_become_one_usable_gaussian_per_chain(tmp_path: Path) -> None:
    config = SGHMCConfig(num_chains=2, draws_per_chain=4, burn_in=0.2)
    run = trainer(tmp_path / "run", config, max_steps=20, eval_dataset=token_rows(4, seed=1), probe_steps=0)
    run.train()
    run.save_model()
    drawn = run.posterior
    fitted = fit_swag(drawn, rank=3)
    assert fitted.config.approximation == fitted.approximation.kind == "gaussian_low_rank"
    assert (fitted.config.num_members, fitted.config.member_chains) == (0, [])
    for chain, theta in enumerate(drawn.approximation.theta.split(4)):
        expected = SWAGConfig(rank=3).through(theta)
        assert torch.equal(fitted.approximation.means[chain], expected.means[0])
        own, alone = (g.covariances[i].variance for g, i in ((fitted.approximation, chain), (expected, 0)))
        assert torch.equal(own, alone)
    assert fitted.config.method == {"name": "swag", "rank": 3, "num_chains": 2, "draws": config.to_dict()}
    before, after = drawn.config.diagnostics, fitted.config.diagnostics
    words = "SWAG through 8 draws of sghmc (chains: 2), itself not assessed; the draws: "
    assert after == {**before, "verdict": words + before["verdict"]}
    assert drawn.config.metrics
    assert not fitted.config.metrics  # they are of the draws
    assert "risk" not in fitted.trace

    fitted.save_pretrained(tmp_path / "run")  # over the draws
    assert posteriors.equal(Posterior.from_pretrained(tmp_path / "run"), fitted)
    assert not list((tmp_path / "run").glob("members/*"))
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path / "run", base_model=tiny_llama())
    assert loaded(**batch()).epistemic.min() > 0


def test_what_has_no_draws_to_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fit_swag takes a Posterior, .* got 'posterior'"):
        fit_swag("posterior")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fit_swag needs a posterior of draws, got one of gaussian"):
        fit_swag(posteriors.gaussian())
    with pytest.raises(ValueError, match=r"2 draws or more of each chain, better many, got \{0: 1, 1: 1, 2: 1\}"):
        fit_swag(posteriors.draws())


def test_nothing_that_was_fitted_to_the_draws_stays() -> None:
    drawn = posteriors.draws(4, abstention=RULE.to_dict(), calibration=CALIBRATED)
    two = Draws(drawn.approximation.theta, torch.tensor([0, 0, 1, 1]))
    config = dataclasses.replace(drawn.config, member_chains=two.chains)
    found = fit_swag(dataclasses.replace(drawn, approximation=two, config=config)).config
    assert (found.abstention, found.calibration, found.metrics) == ({}, {}, {})
