"""The network of ``double_pendulum``, its likelihood and prior, and the methods in the lines of the table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_bayes import MixtureDensity
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Kernel, Problem
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.mcmc.penalty import PenaltyConfig, PenaltyState
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from scripts.reproduce.streamlined_models import MLPConfig, MLPForSequenceClassification

WIDTHS = (20, 10, 10, 9)
LIKELIHOOD = MixtureDensity(num_components=1, num_numbers=4, min_std=1e-30)
"""Nine outputs: the logit of the mixture's one component, four means, and four log standard deviations. The logit
changes nothing, but the paper's 419 parameters are only reached with it. The paper has no smallest standard deviation,
and no chain comes near this one."""


L2 = 1e-5
"""The lambda of the paper's prior exp(-lambda |theta|^2), a Gaussian of standard deviation 224."""


def network() -> MLPForSequenceClassification:
    """Return the paper's network. Its weights do not matter, because chains start at ``starts``."""
    torch.manual_seed(0)
    return MLPForSequenceClassification(MLPConfig(WIDTHS, "tanh"))


def starts(num_chains: int, seed: int) -> Tensor:
    """Return starts [M, 419]: weights N(0, 1 / fan-in), biases 0."""
    rng, pieces = generator(seed, "starts"), []
    for parameter in network().parameters():
        scale = parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.0
        pieces.append(scale * torch.randn(num_chains, parameter.numel(), generator=rng))
    return torch.cat(pieces, 1)


class Unpenalised(PenaltyConfig):
    """Minibatch Metropolis that takes the batches of an update for all of the data, so that its penalty is 0."""

    def build(self, problem: Problem) -> Kernel[PenaltyState]:
        disjoint = PenaltyConfig(**{**vars(self), "replacement": False})
        return disjoint.build(problem._replace(batch_fraction=1.0))


@dataclass(frozen=True)
class Contender:
    """A method in one line of the table.

    Attributes:
        method: the config of the method.
        full: True if the likelihood has the weight of all rows, False for the weight of one batch (the paper's target).
        trained: True if chains start at trained networks.
        updates: share of the run's updates. Expensive methods make fewer.
    """

    method: MethodConfig
    full: bool = False
    trained: bool = True
    updates: float = 1.0


PRIOR_STD = (2 * L2) ** -0.5
RANDOM_WALK = MetropolisConfig(target_acceptance=0.234, adapt_scale=False, prior_std=PRIOR_STD)
"""Proposals with one standard deviation for all parameters, as those of ``penalty``."""
HAMILTONIAN = HMCConfig(num_leapfrog=20, prior_std=PRIOR_STD)
LANGEVIN = SGLDConfig(prior_std=PRIOR_STD)
PENALTY = PenaltyConfig(target_acceptance=0.234, prior_std=PRIOR_STD)
BATCHED = Unpenalised(target_acceptance=0.234, prior_std=PRIOR_STD)

CONTENDERS = {
    "vanilla": Contender(RANDOM_WALK, full=True),
    "tempered": Contender(RANDOM_WALK),
    "batched": Contender(BATCHED),
    "pseudo-SGLD": Contender(LANGEVIN, updates=2),
    "penalty": Contender(PENALTY),
    "tempered, HMC": Contender(HAMILTONIAN, updates=0.5),
    "tempered, untrained start": Contender(RANDOM_WALK, trained=False),
    "tempered, HMC, untrained start": Contender(HAMILTONIAN, trained=False, updates=0.5),
    "batched, untrained start": Contender(BATCHED, trained=False),
    "pseudo-SGLD, untrained start": Contender(LANGEVIN, trained=False, updates=2),
    "penalty, untrained start": Contender(PENALTY, trained=False),
    "batched, T = 1": Contender(BATCHED, full=True),
    "penalty, T = 1": Contender(PENALTY, full=True),
}
"""The paper's five first, then further methods for comparison."""
