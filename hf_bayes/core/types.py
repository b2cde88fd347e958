"""The types and protocols that all methods share.

A method receives an ``Evaluation``, carries a state from update to update, and produces draws. ``theta`` is always
[M, d]. A *member* is one row of ``theta``: a chain of a sampler, a member of an ensemble, or a Monte Carlo draw.
Energies and log-likelihoods are in nats on the full data set. No quantity here is divided by N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_bayes.core.likelihood_facts import UNKNOWN, LikelihoodFacts

Info = dict[str, Tensor]
"""The figures of one update for diagnostics: name -> [M], one number per chain."""

Rngs = Sequence[torch.Generator]
"""One generator per chain, seeded by (seed, chain). A chain's draws do not depend on the number of chains."""


class Evaluation(NamedTuple):
    """The values of the model at ``theta`` [M, d]. They do not include the prior, which is a separate object.

    Attributes:
        log_lik: [M] log p(D | theta) in nats on the full-data scale; for a batch, an unbiased estimate. Kernels get it
            in float64 from a trainer, whatever the dtype of theta, because they accept or reject by small differences.
        grad_log_lik: [M, d] the gradient of ``log_lik``; None if only the value was requested.
        grad_variance: [M, S] the variance of an element of the gradient over random batches, averaged over each of
            the S random tensors; None unless the method uses it (``Requirements.gradient_variance``).
        batch_log_lik: [M, K] an unbiased estimate of ``log_lik`` from each of the K batches, whose mean it is; None
            unless the objective returns it, as models do for kernels that use minibatches.
        loss: [M] minus the mean log-likelihood of a term in these batches, for logs; None if there are no terms.
        anchor_grad: [M, d] or [M, J, d] the gradient on the same batches at one other point, or at J other points
            (``Rule.anchor``); None unless requested.
    """

    log_lik: Tensor
    grad_log_lik: Tensor | None
    grad_variance: Tensor | None = None
    batch_log_lik: Tensor | None = None
    loss: Tensor | None = None
    anchor_grad: Tensor | None = None


class ChainState(Protocol):
    """The state of the chains: a NamedTuple of tensors, whose first axis is the member axis.

    A state and the generators are all that a resumed run needs. ``theta`` holds the point that the model is evaluated
    at and that a draw stores. Step counters are int64 [M].
    """

    @property
    def theta(self) -> Tensor: ...

    @property
    def _fields(self) -> tuple[str, ...]: ...

    def _asdict(self) -> dict[str, Any]: ...


State = TypeVar("State", bound=ChainState)
"""The state of one method."""


class Prior(Protocol):
    """The log density of a prior, with the normaliser that its class documents, and the gradient."""

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return log p(theta) [M] in nats for theta [M, d]."""
        ...

    def grad(self, theta: Tensor) -> Tensor:
        """Return the gradient [M, d] of ``log_prob`` for theta [M, d]."""
        ...

    def to(self, like: Tensor) -> Prior:
        """Return the same prior in the dtype and on the device of ``like``."""
        ...


class Approximation(Protocol):
    """The result of a run, from which members are drawn: ``Draws`` or ``Gaussian``."""

    @property
    def kind(self) -> str: ...

    @property
    def num_stored(self) -> int: ...

    @property
    def mean(self) -> Tensor: ...

    def sample(self, num_members: int, generator: torch.Generator | None = None) -> Tensor: ...


class Evaluate(Protocol):
    """The model, as a kernel calls it: the log-likelihood of all data, or of this update's batches, at any theta.

    ``batches`` selects some batches of the update; None takes all of them.
    """

    def __call__(self, theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation: ...


UNNAMED = ""
"""The name of theta where it is one tensor without a name. No parameter of a module can have this name."""


class Problem(NamedTuple):
    """The run that a method is built for.

    Attributes:
        num_data: N, the number of likelihood terms. Step sizes are per N: ``learning_rate`` multiplies grad U / N.
        prior: log p(theta).
        learning_rate: l0, the peak step size of the schedule; frictions are computed from it.
        own_step_size: the method finds its step size by itself (``Requirements.learning_rate``). ``learning_rate`` and
            the learning rates of updates are then factors of it.
        num_steps: number of updates in the whole run.
        burn_in: number of updates before the first draw; adaptation ends there.
        shapes: name -> shape of each random tensor, in the order of theta; {UNNAMED: (d,)} where theta has no names.
        draw_steps: the updates (counted from 1) that end in a draw.
        batch_fraction: n / N, the share of the data's rows in one batch; None if it is not known.
        update_fraction: R / N, the share of the data's rows in one update of a chain; None if it is not known.
        likelihood: the facts about the likelihood, for methods that compute curvature.
        seed: seed of the draws by which a method compares priors.
    """

    num_data: float
    prior: Prior
    learning_rate: float
    num_steps: int
    burn_in: int
    shapes: Mapping[str, tuple[int, ...]]
    draw_steps: range = range(0)
    batch_fraction: float | None = None
    update_fraction: float | None = None
    likelihood: LikelihoodFacts = UNKNOWN
    seed: int = 0
    own_step_size: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each random tensor; the sum is d."""
        return tuple(map(math.prod, self.shapes.values()))


class RowScores(NamedTuple):
    """The NLL of every held-out row, for comparisons that are paired by row.

    Attributes:
        nll: [R] nats, summed over the likelihood terms of a row.
        terms: [R] the number of likelihood terms in each row.
    """

    nll: NDArray[np.float64]
    terms: NDArray[np.int64]


class DataPasses(Protocol):
    """More passes over the data, for a method that needs them (``Rule.early_passes``, ``Rule.final_pass``).

    Every objective of a run (``chains.objective.Objective``) makes them. Held-out rows have three parts: "all" of them,
    "even" or "odd" ones.
    """

    def curvature(self, theta: Tensor, spec: Any, *, gradient: bool = True) -> Any:
        """Return log-likelihood, gradient and curvature of the training rows at one point.

        Args:
            theta: [d].
            spec: the estimator and the structure, a ``methods.laplace.supported.CurvatureSpec``.
            gradient: estimate the gradient, too.
        Returns:
            A ``methods.laplace.pass_result.PassResult``.
        """
        ...

    def full_gradient(self, theta: Tensor, *, share: float = 1.0) -> Tensor | None:
        """Return the gradient of log p(D | theta) [M, d] on all training rows, for ``theta`` [M, d].

        It is the mean, over random batches, of the gradient that an update computes. It is None where such a mean does
        not exist: with dropout, or with private rows.

        Args:
            share: the share of the rows to take, drawn at random but always the same; below 1 the result is an
                estimate.
        """
        ...

    def heldout(
        self, theta: Tensor, part: str, *, num_members: int | None = None, gradient: bool = False
    ) -> tuple[float, Tensor | None]:
        """Return the NLL of the mixture of draws ``theta`` [M, d], in nats per held-out term, and its gradient [M, d].

        Args:
            part: the rows to score.
            num_members: the number n of draws that will predict; None is M. For another n than M the score is an
                estimate: the NLL of n draws is close to a + b / n, where the mean NLL of single draws (n = 1) and the
                NLL of the mixture (n = M) determine a and b.
            gradient: compute the gradient of the mixture of these M draws.
        """
        ...

    def heldout_by_row(
        self, theta: Tensor, part: str, *, num_groups: int = 1, num_members: int | None = None
    ) -> list[RowScores]:
        """Return the score of every held-out row, for each group of draws ``theta`` [M, d].

        Args:
            part: the rows to score.
            num_groups: the number of groups of successive draws, all of one size. Each group is a mixture of its own.
            num_members: the number of draws of a group that will predict, as in ``heldout``. The estimate is made for
                each row, and may be negative for a single one.
        """
        ...


EarlyPass = Callable[[Any, DataPasses], Any]
"""(state, passes) -> state, see ``Rule.early_passes``."""

LaterStart = Callable[[Any, Evaluate, Rngs], Any]
"""(state, evaluate, rngs) -> state, see ``Kernel.later_starts``."""


class FinalPassResult(NamedTuple):
    """The result of one more pass over the data.

    Attributes:
        approximation: the result of the run.
        report: {name: JSON-ready values}, for the posterior's diagnostics: a value for each chain, or for what else the
            method documents, such as the rungs of a ladder.
        noise_std: the fitted noise of a regression; None leaves it as it is.
        fields: fields of the method's config that the run has found; they replace those it began with. None if there
            are none.
    """

    approximation: Approximation
    report: dict[str, list[Any]]
    noise_std: float | None = None
    fields: Mapping[str, Any] | None = None


def no_anchor(state: Any) -> None:
    """Return None, for no further points: the usual ``Rule.anchor``."""


def scale_momentum(state: Any, ratio: float) -> Any:
    """Return the state with its momentum, if any, at ``ratio`` times its temperature: the usual ``Rule.rescale``."""
    return state._replace(momentum=math.sqrt(ratio) * state.momentum) if hasattr(state, "momentum") else state


def no_restart(state: State, chains: Tensor) -> State:
    """Return the state unchanged: the usual ``Rule.restart``."""
    return state


def no_estimate(state: Any) -> bool:
    """Return False, for a rule that moves theta in every update: the usual ``Rule.estimates``."""
    return False


class Rule(NamedTuple, Generic[State]):
    """A method with one gradient per update: SG-MCMC, variational inference, MAP.

    Attributes:
        init: (theta [M, d], rngs) -> state.
        locate: (state, rngs) -> (theta [M, d] at which the gradient is needed, state); called once per update.
        update: (state, evaluation, lr, rngs) -> (state, info), with lr the step size of this update.
        finish: (state, draws [M, S, d]) -> Approximation.
        final_pass: (state, draws, passes) -> FinalPassResult, in place of ``finish`` where a pass over the data
            is possible; None if the method does not need one.
        early_passes: number of updates -> (state, passes) -> state, called once after so many updates: the method
            finds settings of its own from passes over the data.
        anchor: state -> points [M, d] or [M, J, d] at which the next update needs the gradient, too
            (``Evaluation.anchor_grad``); None if it needs none.
        rescale: (state, ratio) -> state of the same chains at ``ratio`` times the temperature, with which another rule
            goes on.
        restart: (state, chains [M]) -> state with some of the chains back where they began to sample, if the method
            knows where that was.
        estimates: state -> True if the next update only estimates something, and leaves theta as it is.
        fits_given_points: ``final_pass`` reads the draws alone, so that a run needs no update.
    """

    init: Callable[[Tensor, Rngs], State]
    locate: Callable[[State, Rngs], tuple[Tensor, State]]
    update: Callable[[State, Evaluation, float, Rngs], tuple[State, Info]]
    finish: Callable[[State, Tensor], Approximation]
    final_pass: Callable[[State, Tensor, DataPasses], FinalPassResult] | None = None
    early_passes: Mapping[int, EarlyPass] = MappingProxyType({})
    anchor: Callable[[State], Tensor | None] = no_anchor
    rescale: Callable[[State, float], State] = scale_momentum
    restart: Callable[[State, Tensor], State] = no_restart
    estimates: Callable[[State], bool] = no_estimate
    fits_given_points: bool = False

    @property
    def is_exact(self) -> bool:
        """False: the gradient of an update may be noisy."""
        return False


class Kernel(NamedTuple, Generic[State]):
    """A method with any number of evaluations per move: HMC, Metropolis.

    Attributes:
        init: (theta [M, d], evaluate, rngs) -> state.
        step: (state, evaluate, rngs) -> (state, info).
        finish: (state, draws [M, S, d]) -> Approximation.
        final_pass: None: a kernel needs no further pass over the data, see ``Rule``.
        later_starts: number of moves -> (state, evaluate, rngs) -> state, called once after so many moves: the kernel
            begins there, after a warm start. As in ``init``, its evaluations are no part of a move.
        functions_of_theta: the fields of the state that ``init`` evaluates at theta, such as the energy. At other
            points they have other values.
    """

    init: Callable[[Tensor, Evaluate, Rngs], State]
    step: Callable[[State, Evaluate, Rngs], tuple[State, Info]]
    finish: Callable[[State, Tensor], Approximation]
    final_pass: None = None
    later_starts: Mapping[int, LaterStart] = MappingProxyType({})
    functions_of_theta: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True: a move compares evaluations, so the target must not change. The method itself may be approximate."""
        return True


def locate_at_theta(state: State, rngs: Rngs) -> tuple[Tensor, State]:
    """Return the chains' own position: the usual ``Rule.locate``."""
    return state.theta, state
