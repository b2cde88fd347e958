from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.posteriors.posterior import Posterior
from tests.faults import posteriors
from tests.faults.posteriors import config, draws


def test_draws_that_are_not_finite_are_named_with_their_member() -> None:
    posterior = draws(3)
    theta = posterior.approximation.theta.clone()
    theta[1, 20] = float("nan")
    with pytest.raises(ValueError, match=r"norm\.weight is not finite in members \[1\]"):
        Posterior(Draws(theta, torch.arange(3)), posterior.config)


def test_equal_draws_are_refused_unless_they_share_a_chain() -> None:
    theta = posteriors.theta(2, posteriors.PLAIN)[[0, 1, 1]]
    with pytest.raises(ValueError, match="are equal: chains that shared"):
        Posterior(Draws(theta, torch.tensor([0, 1, 2])), config())
    Posterior(Draws(theta, torch.tensor([0, 1, 1])), config())


@pytest.mark.parametrize(
    ("approximation", "changes", "message"),
    [
        (Draws(torch.zeros(2, 25), torch.arange(2)), {}, "2 draws, but num_members is 3"),
        (Draws(torch.randn(3, 7), torch.arange(3)), {}, "theta has 7 columns, the parameters have 25"),
        (Draws(torch.randn(3, 25).bfloat16(), torch.arange(3)), {}, "must be float32 or float64"),
        (Gaussian.diagonal(torch.zeros(1, 25), torch.ones(1, 25)), {}, "is gaussian, the config has draws"),
        (Draws(torch.randn(3, 25), torch.arange(3)), {"member_chains": [0, 0, 0]}, "the config has"),
    ],
)
def test_parts_that_disagree_are_refused(approximation: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Posterior(approximation, config(**changes))


def test_adapter_with_one_factor_only_is_refused() -> None:
    parameters = posteriors.LORA[:1]
    with pytest.raises(ValueError, match=r"q_proj\.lora_A\.weight without .*q_proj\.lora_B\.weight"):
        Posterior(
            Draws(posteriors.theta(3, parameters), torch.arange(3)),
            config(parameters=parameters),
            posteriors.ADAPTER_CONFIG,
        )
