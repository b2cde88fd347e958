"""The prior predictive: the classes that a prior expects before it has seen a label (cold_posteriors section 5.2)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, default_data_collator

from hf_bayes.core.config import MethodConfig, check_config
from hf_bayes.core.number_checks import is_count
from hf_bayes.core.rng import generator, require_seed
from hf_bayes.core.tensors import tensors_in
from hf_bayes.distributions.energy import IndependentPrior
from hf_bayes.distributions.priors import build_prior
from hf_bayes.fit.finished_models import batches_by_number, check_rows_and_batch_size
from hf_bayes.members.inputs import without_labels
from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel

NUM_BARS = 20
"""Classes in the plot, at most."""


@dataclass(frozen=True, eq=False)
class PriorPredictive:
    """Class histograms, each the mean over all inputs x of p(y | x, theta).

    Attributes:
        per_draw: [S, C] of each theta ~ p(theta); rows sum to 1.
    """

    per_draw: Tensor

    @property
    def mean(self) -> Tensor:
        """The marginal prior predictive [C]: the average over draws."""
        return self.per_draw.mean(0)

    def plot(self, file: str | os.PathLike[str], *, num_draws: int = 3) -> None:
        """An image: histograms of the first ``num_draws`` draws beside the mean; of many classes the likeliest."""
        order = self.mean.topk(min(NUM_BARS, len(self.mean))).indices
        if len(order) == len(self.mean):
            order = order.sort().values
        shown = [*self.per_draw[:num_draws], self.mean]
        titles = [*(f"draw {index}" for index in range(len(shown) - 1)), f"mean of {len(self.per_draw)} draws"]
        figure = Figure(figsize=(3 * len(shown), 2.8), layout="constrained")
        axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        labels = [str(int(label)) for label in order]
        for axis, title, histogram in zip(axes, titles, shown, strict=True):
            axis.bar(labels, histogram[order].numpy(), color="C1" if axis is axes[-1] else "C0")
            axis.axhline(1 / len(self.mean), color="0.5", lw=1, ls="--", label="uniform")
            axis.set(title=title, xlabel="class")
            axis.tick_params(axis="x", labelrotation=90 if len(labels) > 10 else 0, labelsize=8)
        axes[0].set_ylabel("probability")
        axes[-1].legend(frameon=False, fontsize=8)
        figure.savefig(file, dpi=120)


@torch.no_grad()
def prior_predictive(
    model: PreTrainedModel | PeftModel,
    data: Any,
    method: MethodConfig,
    *,
    num_draws: int = 100,
    collate: Callable[..., Any] | None = None,
    batch_size: int = 8,
    subspace: str = "trainable",
    seed: int = 0,
) -> PriorPredictive:
    """Return the classes that a model predicts for ``data`` at weights drawn from the prior of a method.

    A good prior allows many functions. A prior is bad if each of its draws gives all inputs the same few classes, even
    if the average over draws is uniform. The model is given back as it was.

    Args:
        model: a causal language model or a classifier; what it makes trainable is random (or ``subspace``).
        data: rows with a length, for ``collate``. Their labels are not used.
        method: a config; only the fields of its prior count.
        num_draws: S, the number of draws from the prior.
        collate: rows -> a batch of tensors; None is transformers' default collator.
        batch_size: rows of a forward pass; the result does not depend on it.
        subspace: the name of the parameters that are random, see ``hf_bayes.core.layout.select``.
        seed: the seed of the draws.
    Returns:
        Class probabilities, averaged over all inputs (for a language model over all positions but padding): [S, C]
        in ``per_draw``, and their average over draws [C] in ``mean``.
    Raises:
        ValueError: for a model without classes, a method that is not a config, or data without rows.
    """
    check_config(method)
    require_seed(seed)
    if not is_count(num_draws):
        raise ValueError(f"num_draws must be an integer >= 1, got {num_draws!r}")
    check_rows_and_batch_size("prior_predictive", "data", data, batch_size)
    with attach(model, subspace=subspace) as bayesian:
        if not bayesian.likelihood.predicts_classes:
            kind = bayesian.likelihood.name
            raise ValueError(f"the prior predictive is over classes, got a model with a {kind} likelihood")
        prior = build_prior(method, bayesian.layout, bayesian.theta[0], model)
        assert isinstance(prior, IndependentPrior)  # the config's own
        draws = prior.sample(num_draws, bayesian.layout.dim, generator(seed, "prior")).to(bayesian.theta)
        sums = torch.zeros((), dtype=torch.float64, device=model.device)
        collate, rows = collate or default_data_collator, range(len(data))
        for batch in batches_by_number(data, rows, model=bayesian, collate=collate, batch_size=batch_size):
            inputs = without_labels(tensors_in(batch))
            sums = sums + torch.stack([_histogram(bayesian, draw, inputs) for draw in draws])
    return PriorPredictive((sums / sums.sum(1, keepdim=True)).float().cpu())


def _histogram(model: BayesianModel, theta: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return class probabilities at ``theta`` [d], summed over rows and positions without padding: [C] float64."""
    model.show(theta[None])  # one draw at a time: its log-probabilities are those of a mixture of one
    probs: Tensor = model(**inputs).logits.double().exp()
    if probs.ndim == 3 and "attention_mask" in inputs:
        probs = probs[inputs["attention_mask"].bool()]
    return probs.flatten(0, -2).sum(0)
