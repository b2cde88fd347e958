"""The data and the density of ``logistic_regression``, written down by hand and as a model in Pyro."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn.functional import softplus

from hf_bayes.core.rng import generator
from scripts.reproduce.minibatches import passes
from scripts.reproduce.pyro_package import require_pyro

BATCH = 32
Energy = Callable[[Tensor, Any], Tensor]


class Rows(NamedTuple):
    """The rows of the data: x [N, d] with a column of ones, y [N] of 0 and 1."""

    x: Tensor
    y: Tensor

    def energy(self, theta: Tensor, picked: Tensor | None) -> Tensor:
        """Return U [M] of theta [M, d]. ``picked`` [M, B] are the rows of each chain; None means all rows."""
        x, y = (self.x, self.y) if picked is None else (self.x[picked], self.y[picked])
        logits = (x @ theta[..., None]).squeeze(-1) if picked is not None else theta @ x.T
        weight = 1.0 if picked is None else len(self.x) / picked.shape[1]
        return weight * (softplus(logits) - y * logits).sum(1) + 0.5 * theta.square().sum(1)

    def batches(self, num_chains: int) -> Callable[[], Iterator[Tensor]]:
        """Return passes over the data: [num_chains, BATCH] rows, in a separate order for each chain."""
        return passes(len(self.x), num_chains, BATCH, generator("order"))


def breast_cancer() -> Rows:
    """Return the ten mean features of 357 benign (y = 1) and 212 malignant tumours."""
    data = load_breast_cancer()
    x = torch.from_numpy(StandardScaler().fit_transform(data.data[:, :10]))
    return Rows(torch.cat([torch.ones(len(x), 1), x], 1), torch.from_numpy(data.target).double())


def pyro_model(rows: Rows) -> Callable[..., None]:
    """Return the model in Pyro. ``picked`` [B] are the rows of a minibatch, which the plate scales up."""
    pyro = require_pyro()

    def model(picked: Tensor | None = None) -> None:
        prior = pyro.distributions.Normal(rows.x.new_zeros(rows.x.shape[1]), 1.0).to_event(1)
        weights = pyro.sample("weights", prior)
        with pyro.plate("rows", len(rows.x), subsample=picked) as at:
            pyro.sample("label", pyro.distributions.Bernoulli(logits=rows.x[at] @ weights), obs=rows.y[at])

    return model


def pyro_energy(rows: Rows) -> Energy:
    """Return the same U from a Pyro model: minus the log density of its trace, for every chain and its minibatch."""
    pyro, model = require_pyro(), pyro_model(rows)

    def log_density(weights: Tensor, picked: Tensor | None) -> Tensor:
        conditioned = pyro.poutine.condition(model, data={"weights": weights})
        return pyro.poutine.trace(conditioned).get_trace(picked).log_prob_sum()

    def energy(theta: Tensor, picked: Tensor | None) -> Tensor:
        with pyro.validation_enabled(False):  # the checks of Pyro read values, which vmap hides
            return -torch.vmap(log_density, in_dims=(0, None if picked is None else 0))(theta, picked)

    return energy
