"""The methods that ``logistic_regression`` compares: all of ``sample``, the Laplace approximation, and Pyro's NUTS."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_bayes.chains.sampling import SampleResult, sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.sgmcmc.baoab import BAOABConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.sgmcmc.sgnht import SGNHTConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from scripts.reproduce.logistic_regression_model import Energy, Rows, pyro_model
from scripts.reproduce.pyro_package import require_pyro


@dataclass(frozen=True)
class Plan:
    """The settings of ``sample`` for a method.

    Attributes:
        method: the config of the method.
        learning_rate: step size.
        updates: updates of each chain. The first fifth is burn-in.
        batched: True for batches of 32 rows.
    """

    method: MethodConfig
    learning_rate: float
    updates: int
    batched: bool = False

    def run(self, rows: Rows, num_chains: int, num_draws: int, energy: Energy | None = None) -> SampleResult:
        """Run chains from N(0, 0.1^2). A chain is a seed of Table 3."""
        dim = rows.x.shape[1]
        starts = 0.1 * torch.randn(num_chains, dim, dtype=torch.float64, generator=generator("starts"))
        thin = max(1, (self.updates - self.updates // 5) // num_draws)
        return sample(
            energy or rows.energy,
            starts,
            self.method,
            num_steps=self.updates,
            learning_rate=self.learning_rate,
            num_data=len(rows.x),
            batches=rows.batches(num_chains) if self.batched else None,
            burn_in=self.updates - thin * num_draws,
            thin=thin,
        )


def plans(updates: int, batched_updates: int, kernel_updates: int) -> dict[str, Plan]:
    """Return the plans. Step sizes follow from the largest curvature, 81: see the page."""
    start = {"warm_start_steps": updates // 10, "warm_start_learning_rate": 0.02}
    sgld = SGLDConfig(**start)
    samplers = {"sghmc": SGHMCConfig(**start), "baoab": BAOABConfig(**start), "sgnht": SGNHTConfig(**start)}
    full = {name: Plan(config, 1.0, updates) for name, config in samplers.items()}
    batched = {name: Plan(config, 0.05, batched_updates, batched=True) for name, config in samplers.items()}
    return {
        "hmc": Plan(HMCConfig(), 0.1, kernel_updates),
        "sgld": Plan(sgld, 1.0, 5 * updates),  # without momentum the autocorrelation time is ten times as long
        **full,
        "mean_field": Plan(MeanFieldConfig(num_draws=1), 0.01, updates // 4),
        "sgld, batch 32": Plan(sgld, 0.5, batched_updates, batched=True),
        **{f"{name}, batch 32": plan for name, plan in batched.items()},
        "mean_field, batch 32": Plan(MeanFieldConfig(num_draws=1), 0.01, updates // 4, batched=True),
    }


def draws_of(result: SampleResult, num_draws: int) -> Tensor:
    """Return [M, num_draws, d]: the draws of the run, or draws from each chain's Gaussian."""
    if not isinstance(result.approximation, Gaussian):
        return result.draws
    gaussian, noise = result.approximation, generator("gaussian")
    eps = torch.randn(len(gaussian.means), num_draws, gaussian.means.shape[1], dtype=torch.float64, generator=noise)
    return gaussian.means[:, None] + gaussian.stds[:, None] * eps


def laplace(rows: Rows, num_chains: int, num_draws: int, updates: int) -> Tensor:
    """Return [num_chains, num_draws, d] from N(MAP, (Hessian of U)^-1), with the MAP found by ``sample``."""
    found = Plan(MAPConfig(), 0.01, updates).run(rows, 1, 1).draws[0, -1]
    hessian = torch.func.hessian(lambda theta: rows.energy(theta[None], None)[0])(found)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian))
    eps = torch.randn(num_chains, num_draws, len(found), dtype=torch.float64, generator=generator("laplace"))
    return found + eps @ factor.T


def nuts(rows: Rows, num_chains: int, num_draws: int, warmup: int) -> Tensor:
    """Return [num_chains, num_draws, d] of Pyro's NUTS on the Pyro model, seed by seed."""
    pyro, model = require_pyro(), pyro_model(rows)
    chains = []
    for seed in range(num_chains):
        pyro.set_rng_seed(seed)
        kernel = pyro.infer.NUTS(model, jit_compile=True, ignore_jit_warnings=True)
        run = pyro.infer.MCMC(kernel, num_samples=num_draws, warmup_steps=warmup, disable_progbar=True)
        run.run()
        chains.append(run.get_samples()["weights"])
    return torch.stack(chains)
