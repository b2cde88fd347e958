"""The samplers that ``agps_targets`` compares: a-GPS and GPS of this package, NUTS and MALA of Pyro."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import biject_to

from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.methods.mcmc.gps import GPSConfig
from hf_bayes.methods.sgmcmc.agps import AGPSConfig
from scripts.reproduce.agps_targets_mixtures import SUPPORTS, Target
from scripts.reproduce.pyro_package import require_pyro


class Found(NamedTuple):
    """Draws [R, S] of R replications, and the processor seconds of single replications."""

    draws: Tensor
    seconds: list[float]


def ours(config: Callable[[Target], MethodConfig], burn_in: int) -> Callable[[Target, int, int, int], Found]:
    """Return our sampler's draws. All replications are chains of one run. The time is for one chain alone."""

    def found(target: Target, replications: int, num_draws: int, timed: int) -> Found:
        def draws(num_chains: int, seed: int) -> Tensor:
            return sample(
                target.energy,
                target.start(num_chains, seed),
                config(target),
                num_steps=burn_in + num_draws,
                learning_rate=1.0,
                burn_in=burn_in,
                seed=seed,
            ).draws.squeeze(2)

        seconds = [_timed(lambda seed=seed: draws(1, seed))[1] for seed in range(timed)]
        return Found(draws(replications, 0), seconds)

    return found


def pyro_kernel(make: Callable[[Any, Callable[..., Tensor]], Any], burn_in: int) -> Callable[..., Found]:
    """Return a function that runs one of Pyro's kernels, one replication after another."""

    def found(target: Target, replications: int, num_draws: int, timed: int) -> Found:
        pyro = require_pyro()

        def draws(seed: int) -> Tensor:
            pyro.set_rng_seed(seed)
            start = biject_to(SUPPORTS[target.family]).inv(target.start(1, seed))
            kernel = make(pyro.infer, lambda sites: target.unconstrained_energy(sites["z"]).sum())
            run = pyro.infer.MCMC(
                kernel,
                num_samples=num_draws,
                warmup_steps=burn_in,
                initial_params={"z": start},
                disable_progbar=True,
            )
            run.run()
            return biject_to(SUPPORTS[target.family])(run.get_samples()["z"]).flatten()

        values, seconds = zip(*[_timed(lambda seed=seed: draws(seed)) for seed in range(timed)], strict=True)
        return Found(torch.stack(values), list(seconds))

    return found


def independent(target: Target, replications: int, num_draws: int, timed: int) -> Found:
    """Return draws of the target itself, the noise floor."""
    return Found(target.draw((replications, num_draws), 0), [])


def _timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Return a result and its processor seconds. The wall clock would include other programs on the same cores."""
    begin = time.process_time()
    made = work()
    return made, time.process_time() - begin


def methods(burn_in: int) -> dict[str, Callable[[Target, int, int, int], Found]]:
    """Return name -> function that makes draws. In the paper a-GPS has no burn-in."""
    return {
        "a-GPS": ours(lambda target: AGPSConfig(family=target.family, max_std=target.max_std), 0),
        "GPS, exact": ours(lambda target: GPSConfig(family=target.family, max_std=target.max_std), burn_in),
        "NUTS": pyro_kernel(lambda infer, energy: infer.NUTS(potential_fn=energy), burn_in),
        "MALA": pyro_kernel(
            lambda infer, energy: infer.HMC(
                potential_fn=energy, step_size=1, trajectory_length=1, target_accept_prob=0.7
            ),
            burn_in,
        ),
        "independent draws": independent,
    }
