"""The protocols every method speaks: Evaluation in, State along, draws out, theta always [M, d].

A *member* is a chain of a sampler, a member of an ensemble or a Monte Carlo draw: one row of ``theta``. Energies and
log-likelihoods are in nats on the full data set; nothing here is divided by N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Info = dict[str, Tensor]
"""What a diagnostic wants from one update: name -> [M], one number per chain."""

Rngs = Sequence[torch.Generator]
"""One generator per chain, seeded by (seed, chain): the draws of a chain do not depend on how many chains there are."""


class Evaluation(NamedTuple):
    """What a method learns from the model at ``theta`` [M, d]. The prior is not in it: it is an object of its own.

    Attributes:
        log_lik: [M] log p(D | theta) in nats on the full-data scale, an unbiased estimate for a batch. A trainer gives
            it to kernels in float64, whatever theta is in: they decide by differences.
        grad_log_lik: [M, d] its gradient; None where only the value was asked for.
        grad_variance: [M, S] variance that the choice of the batch gives an element of the gradient, mean over each of
            the S random tensors; None unless the method has a use for it (``Requirements.gradient_variance``).
        batch_log_lik: [M, K] an unbiased estimate of the same from each of the K batches, whose mean ``log_lik`` is;
            None where every evaluation sees all data.
        loss: [M] minus the mean log-likelihood of a term in these batches, for logs; None where there are no terms.
    """

    log_lik: Tensor
    grad_log_lik: Tensor | None
    grad_variance: Tensor | None = None
    batch_log_lik: Tensor | None = None
    loss: Tensor | None = None


class State(Protocol):
    """A NamedTuple of tensors whose first axis is the member axis: all that a resume needs, with the generators.

    ``theta`` is what evaluation shows and what a draw is; step counters are int64 [M].
    """

    @property
    def theta(self) -> Tensor: ...

    def _asdict(self) -> dict[str, Tensor]: ...


class Prior(Protocol):
    """log p(theta) up to the normaliser it states, and its gradient."""

    def log_prob(self, theta: Tensor) -> Tensor:
        """[M, d] -> [M], nats."""
        ...

    def grad(self, theta: Tensor) -> Tensor:
        """[M, d] -> [M, d], the gradient of ``log_prob``."""
        ...


class Approximation(Protocol):
    """What a run ends in: something that fills the member axis. ``posterior.Draws`` and ``posterior.Gaussian`` are."""

    @property
    def kind(self) -> str: ...

    @property
    def num_stored(self) -> int: ...

    @property
    def mean(self) -> Tensor: ...

    def sample(self, num_members: int, generator: torch.Generator | None = None) -> Tensor: ...


class Evaluate(Protocol):
    """The model as a kernel sees it: log-likelihood of all data (or the batches of this step) at any theta.

    ``batches`` picks some of the step's batches, None takes all of them.
    """

    def __call__(self, theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation: ...


UNNAMED = ""
"""In place of names where theta is one tensor of its own; no parameter of a module can be called so."""


class Problem(NamedTuple):
    """What a method is built for.

    Attributes:
        num_data: N, the number of likelihood terms. Step sizes are per N: ``learning_rate`` multiplies grad U / N.
        prior: log p(theta).
        learning_rate: l0, the peak step size of the schedule (frictions are fixed by it).
        num_steps: updates in the whole run.
        burn_in: updates before the first draw; adaptation ends there.
        shapes: name -> shape of each random tensor, in the order of theta; {UNNAMED: (d,)} where theta has no names.
        draw_steps: the updates (counted from 1) that end in a draw.
        batch_fraction: n / N, the share of the data's rows in one batch; None where it is not known.
        most_terms: likelihood terms of the row of the data that has most; None where nobody has counted.
        root_columns: of a root of the Fisher information of a term in the model's outputs; None where it is not known.
        noise_std: of a regression's labels; None of other likelihoods.
        seed: of draws that a method compares priors by.
    """

    num_data: float
    prior: Prior
    learning_rate: float
    num_steps: int
    burn_in: int
    shapes: Mapping[str, tuple[int, ...]]
    draw_steps: range = range(0)
    batch_fraction: float | None = None
    most_terms: int | None = None
    root_columns: int | None = None
    noise_std: float | None = None
    seed: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each random tensor (sum = d)."""
        return tuple(map(math.prod, self.shapes.values()))


class HeldOut(NamedTuple):
    """What draws [M, d] are asked for: their mixture's mean nats per held-out term, and the gradient [M, d].

    Attributes:
        part: which rows: "all", "even" or "odd" ones.
    """

    part: str


class Look(Protocol):
    """One more pass over the data after the last update, for a method that asks for it (``Rule.revise``)."""

    def __call__(self, theta: Tensor, what: Any, *, gradient: bool) -> Any:
        """What is found: of ``laplace.cells.CurvatureSpec`` at ``theta`` [d] a ``survey.Survey``; of
        ``HeldOut`` at ``theta`` [M, d] the mixture's nats per held-out term, and their gradient.
        """
        ...


class Revision(NamedTuple):
    """What a method makes of a pass over the data.

    Attributes:
        approximation: the result of the run.
        report: {name: a JSON-ready value for each chain}, for the posterior's diagnostics.
        noise_std: of a regression, learnt; None keeps it.
    """

    approximation: Approximation
    report: dict[str, list[Any]]
    noise_std: float | None = None


class Rule(NamedTuple):
    """One gradient per update: SG-MCMC, VI, MAP.

    Attributes:
        init: (theta [M, d], rngs) -> State.
        locate: (state, rngs) -> (theta [M, d] at which the gradient is wanted, state); once per update.
        update: (state, evaluation, lr, rngs) -> (state, info), with lr the step size of this update.
        finish: (state, draws [M, S, d]) -> Approximation.
        revise: (state, draws, look) -> Revision: in place of ``finish`` where there are data to look at; None if the
            method has no use for it.
    """

    init: Callable[[Tensor, Rngs], Any]
    locate: Callable[[Any, Rngs], tuple[Tensor, Any]]
    update: Callable[[Any, Evaluation, float, Rngs], tuple[Any, Info]]
    finish: Callable[[Any, Tensor], Approximation]
    revise: Callable[[Any, Tensor, Look], Revision] | None = None


class Kernel(NamedTuple):
    """As many evaluations a move as it likes: HMC, Metropolis.

    Attributes:
        init: (theta [M, d], evaluate, rngs) -> State.
        step: (state, evaluate, rngs) -> (state, info).
        finish: (state, draws [M, S, d]) -> Approximation.
    """

    init: Callable[[Tensor, Evaluate, Rngs], Any]
    step: Callable[[Any, Evaluate, Rngs], tuple[Any, Info]]
    finish: Callable[[Any, Tensor], Approximation]


def locate_at_theta(state: Any, rngs: Rngs) -> tuple[Tensor, Any]:
    """The usual ``Rule.locate``: the gradient is wanted where the chain is."""
    return state.theta, state
