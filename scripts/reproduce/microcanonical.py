"""Microcanonical Langevin dynamics with minibatches against SGHMC, and step sizes by the variance of the energy.

    python -m scripts.reproduce.microcanonical      # the runs that docs/results/microcanonical.json lacks

A microcanonical chain (Robnik et al. 2023) moves with speed 1. Its velocity u [d] turns away from the gradient g of U:

    u <- (u + e (sinh a + (e.u) (cosh a - 1))) / (cosh a + (e.u) sinh a),    e = -g / |g|,  a = s |g| / (d - 1)

and theta <- theta + s u / 2 before and after. The kinetic energy changes by (d - 1) log(cosh a + (e.u) sinh a). A
little noise turns u, too, so that it is forgotten over a length L. Sommer et al. (2026, arXiv:2602.06500) use
minibatches, and tune s by the variance of the change of the energy in an update. This module takes the usual target of
that variance for each dimension.

Both samplers have the same targets (``gold_targets``), coordinates, starts, minibatches and control variates, and
neither is run by the library, so that only the move and the rule of the step size differ.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from hf_bayes.core.rng import generator
from scripts.reproduce.gold_chains import Gold, Whitened, load, whitened, with_ones
from scripts.reproduce.gold_runs import distance
from scripts.reproduce.gold_targets import RECIPES, Target, target
from scripts.reproduce.report import RESULTS, as_text, keep, table

PAGE = "microcanonical"
CHAINS, BATCH = 16, 64
BURN_IN, SAMPLED = 4, 30
"""Passes of a chain over the data. An update takes two gradients, one of them for the control variate."""
DRAWS = 120
"""Draws of a chain."""
TARGET = 5e-4
"""Variance of the change of the energy for each dimension, as in the tuner of Robnik et al. (2023)."""
MAX_STEP = 0.2
ALLOWED = 0.02
"""h^2 V of the library's SGHMC: 2 heating (1 - beta), with a heating of 0.1 and beta = 0.9."""
PILOT, PILOTS = 60, 8
"""Updates of a run that measures the variance of the energy, and the number of such runs."""
LEAST_NOISE = 0.05
"""The smallest variance of the noise, relative to the largest, that its scale divides by."""


class Setting(NamedTuple):
    """A row of the table.

    Attributes:
        microcanonical: or SGHMC.
        rule: of the step size: the "heating" that the library allows, or the variance of the energy "of a batch" or
            "of all rows".
        mirrored: every second chain has the noise of the one before, with the opposite sign.
        scaled: coordinates are divided by the standard deviation of the gradient's noise.
    """

    microcanonical: bool
    rule: str
    mirrored: bool = False
    scaled: bool = False


SETTINGS = {
    "SGHMC, allowed heating": Setting(False, "heating"),
    "SGHMC, allowed heating, mirrored pairs": Setting(False, "heating", mirrored=True),
    "microcanonical, allowed heating": Setting(True, "heating"),
    "microcanonical, allowed heating, mirrored pairs": Setting(True, "heating", mirrored=True),
    "microcanonical, energy of a batch": Setting(True, "batch"),
    "microcanonical, energy of a batch, scaled noise": Setting(True, "batch", scaled=True),
    "microcanonical, energy of all rows": Setting(True, "rows"),
}


@dataclass
class Posterior:
    """U in whitened coordinates v [M, d], on batches, with a control variate at the mode."""

    rows: Target
    about: Whitened
    at_mode: Tensor = field(init=False)

    def __post_init__(self) -> None:
        every = torch.arange(self.rows.num_rows)[None]
        self.at_mode = self.gradient(torch.zeros(1, self.dim), every)[1]

    @property
    def dim(self) -> int:
        return self.about.scale.numel()

    def gradient(self, v: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return U [M] and its gradient [M, d], of batches of rows by number [M, B]."""
        about, share = self.about, self.rows.num_rows / numbers.shape[1]
        x, y = about.rotated[numbers], about.one_hot[numbers]
        weights = about.mode + about.scale * v.unflatten(1, about.scale.shape)
        log_probs = (x @ (weights @ about.right.T)).log_softmax(-1)
        energy = weights.square().sum((1, 2)) / 2 - share * (log_probs * y).sum((1, 2))
        errors = share * x.transpose(1, 2) @ (log_probs.exp() - y)
        return energy, ((errors @ about.right + weights) * about.scale).flatten(1)

    def controlled(self, v: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return U and its gradient, with the gradient of all rows at the mode in place of the batch's."""
        correction = self.at_mode - self.gradient(torch.zeros_like(v), numbers)[1]
        energy, gradient = self.gradient(v, numbers)
        return energy + (correction * v).sum(1), gradient + correction


@dataclass
class Chains:
    """The chains of a row.

    Args:
        scale: [d] of the coordinates; v = scale * z.
    """

    posterior: Posterior
    setting: Setting
    scale: Tensor
    rng: torch.Generator

    def __post_init__(self) -> None:
        self.v = self.noise()  # draws of the Laplace approximation
        self.u = _unit(self.noise()) if self.setting.microcanonical else self.noise()

    def noise(self) -> Tensor:
        """Return normal numbers [M, d]."""
        shape = CHAINS // 2 if self.setting.mirrored else CHAINS, self.posterior.dim
        found = torch.randn(shape, generator=self.rng)
        return torch.stack([found, -found], 1).flatten(0, 1) if self.setting.mirrored else found

    def batch(self) -> Tensor:
        """Return the numbers of rows [M, B], of each chain its own."""
        return torch.randint(self.posterior.rows.num_rows, (CHAINS, BATCH), generator=self.rng)

    def update(self, step: float, numbers: Tensor) -> Tensor:
        """Move the chains by a step h; return [M] the change of the kinetic energy."""
        if not self.setting.microcanonical:
            self.u = 0.9 * self.u - step * self.posterior.controlled(self.v, numbers)[1] + math.sqrt(0.2) * self.noise()
            self.v = self.v + step * self.u
            return torch.zeros(CHAINS)
        dim = self.posterior.dim
        length = step * math.sqrt(dim)  # in a time h, a chain of speed sqrt(d) moves as far as a typical draw of SGHMC
        half = length / 2 * self.scale
        middle = self.v + half * self.u
        gradient = self.posterior.controlled(middle, numbers)[1] * self.scale
        self.u, kinetic = turned(self.u, gradient, length)
        self.v = middle + half * self.u
        forgetting = math.sqrt(math.expm1(2 * step) / dim)  # L is sqrt(d), a typical distance from the mode
        self.u = _unit(self.u + forgetting * self.noise())
        return kinetic

    def energy_variance(self, step: float) -> float:
        """Return the variance of the change of the energy in an update, for each dimension."""
        changes = []
        for _ in range(PILOT):
            numbers, before = self.batch(), self.v
            kinetic = self.update(step, numbers)
            after, energy = self.v, self.posterior.about.energy
            if self.setting.rule == "batch":
                change = self.posterior.controlled(after, numbers)[0] - self.posterior.controlled(before, numbers)[0]
            else:
                change = energy(after) - energy(before)
            changes.append(change + kinetic)
        return float(torch.stack(changes).var()) / self.posterior.dim


def turned(u: Tensor, gradient: Tensor, length: float) -> tuple[Tensor, Tensor]:
    """Return velocities [M, d] turned away from gradients, and the change of the kinetic energy [M].

    With x = exp(-a), the numbers sinh a and cosh a do not overflow (Robnik et al. 2023, eq. 16).
    """
    dim = u.shape[1]
    norm = gradient.norm(dim=1, keepdim=True)
    e, a = -gradient / norm, length * norm / (dim - 1)
    along, x = (e * u).sum(1, keepdim=True), (-a).exp()
    found = e * (1 - x) * (1 + x + along * (1 - x)) + 2 * x * u
    kinetic = a - math.log(2) + torch.log1p(along + (1 - along) * x.square())
    return _unit(found), (dim - 1) * kinetic[:, 0]


def _unit(u: Tensor) -> Tensor:
    return u / u.norm(dim=1, keepdim=True)


def noise_of(posterior: Posterior, rng: torch.Generator, count: int = 32) -> Tensor:
    """Return [d] the variance of the gradient over batches, at draws of the Laplace approximation."""
    pairs = []
    for _ in range(count):
        v = torch.randn(CHAINS, posterior.dim, generator=rng)
        one, other = (
            posterior.controlled(v, torch.randint(posterior.rows.num_rows, (CHAINS, BATCH), generator=rng))[1]
            for _ in range(2)
        )
        pairs.append((one - other).square() / 2)
    return torch.cat(pairs).mean(0)


def step_of(chains: Chains, variances: Tensor) -> float:
    """Return h by the rule of a row."""
    if chains.setting.rule == "heating":
        informed = chains.posterior.about.scale.flatten().square() < 0.5  # where the data say more than the prior
        return min(MAX_STEP, math.sqrt(ALLOWED / float(variances[informed].mean())))
    step, power = 0.05, 6 if chains.setting.rule == "batch" else 2
    for _ in range(PILOTS):  # the variance grows about as the sixth power of h, or as its square
        step *= min(2.0, max(0.5, (TARGET / chains.energy_variance(step)) ** (1 / power)))
    return step


def measured(posterior: Posterior, gold: Gold, setting: Setting) -> dict[str, float]:
    """Return the distances of a run from the gold, with its step size and its CPU time."""
    begin, rng = time.process_time(), generator("microcanonical")
    variances = noise_of(posterior, rng)
    scale = torch.ones(posterior.dim)
    if setting.scaled:
        scale = variances.clamp_min(LEAST_NOISE * float(variances.max())).rsqrt()
        scale /= scale.log().mean().exp()
    step = step_of(Chains(posterior, setting, scale, rng), variances)
    chains, draws = Chains(posterior, setting, scale, rng), []
    burn_in, sampled = (passes * posterior.rows.num_rows // BATCH // 2 for passes in (BURN_IN, SAMPLED))
    for number in range(1, burn_in + sampled + 1):
        chains.update(step, chains.batch())
        if number > burn_in and (number - burn_in) % max(1, sampled // DRAWS) == 0:
            draws.append(chains.v)
    test = with_ones(posterior.rows.test) @ posterior.about.left
    logits = posterior.about.logits(test, torch.cat(draws)).transpose(0, 1)
    found = distance(logits.double(), gold)
    return {**found, "step": round(step, 4), "members": len(logits), "seconds": round(time.process_time() - begin)}


def experiment() -> dict[str, Any]:
    """Return the record after the missing runs."""
    path = RESULTS / f"{PAGE}.json"
    record = json.loads(path.read_text()) if path.exists() else {"seconds": 0, "runs": {}}
    for name in RECIPES:
        posterior, gold = None, load(name)
        runs = record["runs"].setdefault(name, {})
        for label, setting in SETTINGS.items():
            if label in runs:
                continue
            posterior = posterior or Posterior(target(name), whitened(target(name)))
            runs[label] = measured(posterior, gold, setting)
            record["seconds"] += runs[label]["seconds"]
            path.write_text(as_text(record))
            print(name, label, runs[label], flush=True)
    return {key: record[key] for key in ("seconds", "runs")}


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the table of the page."""
    rows = [
        [name, label, f"{run['tv']:.4f}", f"{run['eu']:.3f}", f"{run['step']:.3f}", run["seconds"]]
        for name, found in record["runs"].items()
        for label, run in found.items()
    ]
    return {"runs": table(["gold", "chains", "TV", "EU / gold", "h", "CPU seconds"], rows)}


def main() -> None:
    """Make the missing runs and the page."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    keep(PAGE, experiment)


if __name__ == "__main__":
    main()
