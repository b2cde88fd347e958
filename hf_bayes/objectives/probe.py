"""A probe: a few likelihood terms of the training data, whose values under every chain show whether chains agree.

The probe has at most ``PROBE_TERMS`` likelihood terms, from whole rows. A text of 2^k tokens has 2^k - 1 terms, so for
256 terms one more text would often be passed than for 240. If each row has one label, the probe may have fewer terms:
its forward passes may cost at most a fiftieth of the run's, but it has at least ``LEAST_ROWS`` rows. After every
``probe_steps`` updates, and at the draws of every chain, it keeps the log-probabilities of its labels and some logits
of other classes. These are functions of the model's outputs, which the symmetries of a LoRA do not change. Their number
does not depend on the size of the vocabulary.

A term keeps all its logits if there are at most ``MAX_CLASSES`` of them. Otherwise it keeps the logits of
``MOST_LIKELY`` classes: those that have the largest logits at the start of the run, without the label. The classes are
the same for all chains, processes and times, and a resumed run finds the same ones. A chain keeps 8 bytes a term and 4
bytes a logit: at most 240 * (8 + 4 * 8) = 10 kB each time, 80 MB for 8 chains and 1000 times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.objectives.model_objective import ModelObjective
from hf_bayes.uncertainty.likelihoods import Likelihood

PROBE_TERMS, LEAST_ROWS = 240, 16
MAX_CLASSES, MOST_LIKELY = 8, 4


class ProbeValues(NamedTuple):
    """The values of a probe under the chains.

    Attributes:
        log_lik: [M, n] float64 log-probabilities of the labels of n terms.
        logits: [M, q] float32 of their outputs; q = 0 where rows are private.
    """

    log_lik: Tensor
    logits: Tensor


class Probe:
    """The values of a few terms under theta. Rows and classes are chosen at the first call.

    Args:
        objective: the objective, for its model, mesh, private rows and autocast.
        choose: number of terms -> prepared batches with labels, which have at least so many terms.
        start: [d] the start of the run, which decides for which classes logits are kept.
        seed: the seed of the choice of classes, for a head that is drawn anew.
        likelihood: returns the likelihood of the run now; that of the model may be a fit at the end of the run. None
            keeps the model's at the start.
    """

    def __init__(
        self, objective: ModelObjective, choose: Callable[[int], list[dict[str, Any]]], start: Tensor, *, seed: int,
        likelihood: Callable[[], Likelihood] | None = None,
    ) -> None:  # fmt: skip
        self._objective, self._choose, self._start, self._seed = objective, choose, start, seed
        at_start = objective.model.likelihood
        self._likelihood = likelihood or (lambda: at_start)
        self.batches: list[dict[str, Any]] | None = None
        self.columns: Tensor | None = None

    def __call__(self, theta: Tensor) -> ProbeValues:
        """Return log-probabilities and logits under theta [M, d]; for private rows, one mean for each process."""
        objective, likelihood = self._objective, self._likelihood()
        if self.batches is None:
            self.batches = self._choose(PROBE_TERMS)
            self.columns = self._choose_columns(self.batches)
        seen, private, columns = 0, objective.private, self.columns

        def of_terms(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal seen
            first, seen = seen, seen + len(labels)
            chosen = None if columns is None else columns[first:seen]
            log_lik = likelihood.log_prob(logits, labels.expand(len(logits), *labels.shape)).double()
            if private is not None:
                return log_lik, log_lik.new_zeros(len(logits), 0)
            return log_lik, likelihood.identified(logits, chosen).float()

        log_liks, logits = zip(*objective.each_term(theta, self.batches, of_terms), strict=True)
        found = torch.cat(log_liks, 1)[:, :PROBE_TERMS]
        if private is None:
            return ProbeValues(found.cpu(), torch.cat(logits, 1)[:, :PROBE_TERMS].flatten(1).cpu())
        # processes that keep their rows exchange a mean, one number a process; a mean logit of each class would show
        # which classes a process has, and is not sent
        means = torch.zeros(len(found), len(private.sizes), dtype=found.dtype, device=objective.model.device)
        means[:, private.rank] = found.mean(1)
        return ProbeValues(objective.passes.mesh.sum_over_data(means).cpu(), torch.zeros(len(found), 0))

    def _choose_columns(self, batches: list[dict[str, Any]]) -> Tensor | None:
        """Return the classes [n, k] whose logits are kept for each term; None keeps all.

        A resumed run finds the same classes. For a language model they follow from its head, which comes with the base
        model. The head of a classifier may be drawn anew, so its classes are drawn with the seed.
        """
        objective, rng = self._objective, generator(self._seed, "probe")
        model = objective.model

        def of_terms(logits: Tensor, labels: Tensor) -> Tensor | None:
            if logits.shape[-1] <= MAX_CLASSES or objective.private is not None:
                return None
            drawn = torch.rand(logits.shape[1:], generator=rng).to(logits.device)
            start = logits[0].float() if model.term_kind == "token" else drawn
            if not self._likelihood().labels_per_output:  # log p of the label is kept anyway
                start = start.scatter(1, labels[:, None], -math.inf)
            return start.topk(MOST_LIKELY, dim=1).indices

        found = objective.each_term(self._start[None], batches, of_terms)
        columns = [part for part in found if part is not None]
        return torch.cat(columns) if columns else None
