"""Every built-in likelihood with outputs and labels for it, in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.uncertainty.custom.adapted import Adapted
from hf_bayes.uncertainty.custom.base import CustomLikelihood
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from hf_bayes.uncertainty.custom.mixture_density import MixtureDensity
from hf_bayes.uncertainty.custom.ordinal import Ordinal
from hf_bayes.uncertainty.custom.poisson import Poisson

OWN: dict[str, CustomLikelihood] = {
    "heteroscedastic": Heteroscedastic(),
    "heteroscedastic of two": Heteroscedastic(num_numbers=2),
    "mixture density": MixtureDensity(num_components=3),
    "mixture density of two": MixtureDensity(num_components=2, num_numbers=2),
    "ordinal": Ordinal(num_classes=4),
    "ordinal with cutpoints": Ordinal(num_classes=4, cutpoints=(-1.0, 0.5, 2.0)),
    "poisson": Poisson(),
    "poisson of two": Poisson(num_counts=2),
}


class Case(NamedTuple):
    """A likelihood with outputs [n, C] and labels [n] or [n, D]."""

    likelihood: Adapted
    outputs: Tensor
    labels: Tensor


def case(name: str, count: int = 5, *, seed: int = 0) -> Case:
    """Return a likelihood, outputs drawn from N(0, 1), and labels within its support."""
    own, rng = OWN[name], torch.Generator().manual_seed(seed)
    assert own.num_outputs is not None
    likelihood = Adapted(own, own.num_outputs)
    outputs = torch.randn(count, own.num_outputs, generator=rng, dtype=torch.float64)
    if likelihood.num_classes is not None:
        return Case(likelihood, outputs, torch.randint(likelihood.num_classes, (count,), generator=rng))
    shape = (count,) if own.label_size == 1 else (count, own.label_size)
    if isinstance(own, Poisson):
        return Case(likelihood, outputs, torch.randint(6, shape, generator=rng).double())
    return Case(likelihood, outputs, torch.randn(shape, generator=rng, dtype=torch.float64))
