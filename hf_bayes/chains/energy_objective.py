"""The energy that a user gives to ``sample``, as the objective of a run: -U and its gradient, with checks.

Mistakes that would end in draws of another law are refused: an energy of the wrong shape, an energy that writes into
theta, and those of ``energy_checks``.

Outside the support the energy may return NaN or infinity, or raise an exception. These exceptions mean such a point
(``OUTSIDE_SUPPORT``): a failed factorisation (``torch.linalg.LinAlgError``, ``numpy.linalg.LinAlgError``), an
``ArithmeticError`` (``OverflowError``, ``ZeroDivisionError``, ``FloatingPointError``), and the ``ValueError`` that
``torch.distributions`` raises for arguments outside a constraint. All other exceptions are errors of the program and
end the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_bayes.chains.energy_hessian import EnergyAtPoint, EnergyPassResult, expand_energy, positive_curvature
from hf_bayes.chains.objective import FailureWords
from hf_bayes.chains.support import is_outside_support
from hf_bayes.chains.theta_form import Aux, Energy, Form
from hf_bayes.core.anchors import at_each_point
from hf_bayes.core.compat import num_writes
from hf_bayes.core.layout import per_tensor_mean
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.tensors import shape_in_words
from hf_bayes.core.types import Evaluation, Info
from hf_bayes.methods.laplace.supported import CurvatureSpec

_SINGLE = ""
"""The name of a single tensor that an energy returns beside its value."""


class EnergyObjective:
    """The user's energy as an objective of a run.

    Args:
        energy: the energy U; if the prior is given separately, minus the log-likelihood alone.
        batched: the energy is an unbiased estimate from a batch.
        form: the form of theta that the energy takes.
        all_batches: a function that yields the batches of one pass over the data; None if the energy sees all data in
            every call.
        requirements: the requirements of the method. For a preconditioner the curvature is a Hessian with the absolute
            values of its eigenvalues, or of its diagonal, above a floor. ``gradient_variance`` is estimated from two
            batches or more.

    Attributes:
        is_exact: every call must see all data, so that a random energy is refused.
        first_error: the first exception that was taken for a point outside the support.
    """

    words = FailureWords(
        "energy", "gradient of the energy", "update", "lower learning_rate, or look at the energy there"
    )

    def __init__(
        self,
        energy: Energy[Any],
        *,
        batched: bool,
        requirements: Requirements,
        form: Form[Any] | None = None,
        all_batches: Callable[[], Iterable[Any]] | None = None,
    ) -> None:
        self.energy, self.batched, self._all_batches = energy, batched, all_batches
        self.form: Form[Any] = Form(None) if form is None else form
        self._positive = requirements.learning_rate == "whitening"
        self._measures_noise = requirements.gradient_variance != "none"
        self.is_exact = requirements.all_data_in_every_update
        self.first_error: Exception | None = None
        self._aux_names: set[str] | None = None  # None before the first call
        self._start_is_checked = False

    def for_update(self, batches: list[Any], *, step: int, inside: Tensor | None = None) -> EnergyOfUpdate:
        """Return the energy on the batches of one update, see ``Objective``.

        Args:
            inside: [M, d] points at which the energy does not raise. With them, a point at which it raises is outside
                the support; without them, an exception ends the run.
        """
        if inside is not None and not self._start_is_checked:
            self._check_start(inside, batches)
            self._start_is_checked = True
        return EnergyOfUpdate(self, batches, inside)

    # -- more passes over the batches, for a method that needs them (``core.types.DataPasses``) ---------------------

    def curvature(self, theta: Tensor, spec: CurvatureSpec, *, gradient: bool = True) -> EnergyPassResult:
        """Return value, gradient and Hessian of minus the energy at ``theta`` [d], the mean over all batches."""
        point = EnergyAtPoint(lambda theta, batch: self._value(theta, batch)[0], theta, self._batches())
        if self._positive:
            return positive_curvature(point, spec)
        return expand_energy(point, theta, spec, gradient=gradient)

    def full_gradient(self, theta: Tensor, *, share: float = 1.0) -> Tensor:
        """Return minus the gradient of the energy at ``theta`` [M, d], the mean over all batches for any ``share``."""
        parts = [self.evaluate(theta, [batch]).grad_log_lik for batch in self._batches()]
        return torch.stack([part for part in parts if part is not None]).mean(0)

    def heldout(self, theta: Tensor, part: str, **options: Any) -> NoReturn:
        """Raise a TypeError: an energy has no rows."""
        raise TypeError("an energy has no held-out rows: the method needs a model and its data")

    heldout_by_row = heldout

    def _batches(self) -> Iterable[Any]:
        return [None] if self._all_batches is None else self._all_batches()

    def place_of(self, column: int) -> str:
        """Return ", " and the name of the tensor that holds a column of theta; "" where it has no name."""
        return self.form.place_of(column)

    @property
    def returns_aux(self) -> bool:
        """Return whether the energy has returned something beside its value."""
        return bool(self._aux_names)

    def aux(self, theta: Tensor, batches: list[Any]) -> Aux:
        """Return what the energy returns beside its value at ``theta`` [M, d]: the mean over the batches."""
        with torch.no_grad():
            found = [self._value(theta, batch)[1] for batch in batches]
        means = {name: _mean([each[name] for each in found]) for name in found[0]}
        return means[_SINGLE] if means.keys() == {_SINGLE} else means

    def evaluate(self, theta: Tensor, batches: list[Any], *, gradient: bool = True) -> Evaluation:
        """Return minus the energy at ``theta`` [M, d], the mean over some batches, and its gradient."""
        with torch.set_grad_enabled(gradient):
            leaf = theta.detach().requires_grad_(gradient)
            values = torch.stack([self._value(leaf, batch)[0] for batch in batches], 1)
            value = values.mean(1)
            columns = -values.detach() if self.batched else None
            if not gradient:
                return Evaluation(-value, None, batch_log_lik=columns)
            if not value.requires_grad:
                raise ValueError("energy must be differentiable in theta: the energy it returned has no gradient")
            if self._measures_noise and len(batches) > 1:
                grads = torch.stack([_gradient(each, leaf, retain=True) for each in values.unbind(1)])
                grad = grads.mean(0)
                variance = grads.var(0) / len(batches)  # of the mean
                noise = per_tensor_mean(variance, tuple(map(math.prod, self.form.shapes(theta.shape[1]).values())))
                return Evaluation(-value.detach(), -grad, noise, batch_log_lik=columns)
            grad = _gradient(value, leaf)
        return Evaluation(-value.detach(), -grad, batch_log_lik=columns)

    def _value(self, theta: Tensor, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return U [M] at ``theta`` [M, d], and by name what the energy returns beside it."""
        given = theta.clone()  # no leaf: autograd would refuse an assignment to a leaf in words of its own
        found = self.energy(self.form.unflatten(given), batch)
        value, aux = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if num_writes(given) or not (torch.equal(given, theta) or bool(theta.isnan().any())):
            raise ValueError(
                "energy must not change theta, which is the state of the chains, got an energy that writes into it "
                "(an operation such as theta += 1, theta[...] = ... or theta.clamp_()): let it work on a new tensor"
            )
        if not isinstance(value, Tensor) or value.shape != theta.shape[:1] or not value.is_floating_point():
            got = f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"energy must return one real number per chain, a floating-point tensor of shape [{len(theta)}] for "
                f"theta {list(theta.shape)}; got {got}: sum over everything but the first axis"
            )
        named = {} if aux is None else _named(aux, len(theta))
        if self._aux_names not in (None, named.keys()):
            raise ValueError(
                "energy must return the same results beside its value in every call, "
                f"got {_in_words(named.keys())} after {_in_words(self._aux_names or ())}"
            )
        self._aux_names = set(named)
        return value, named

    def _check_start(self, theta: Tensor, batches: list[Any]) -> None:
        """Check that chains start where the energy is finite.

        Raises:
            FloatingPointError: for a number that is not finite, or an exception that means a point outside the support,
                naming chains.
        """
        try:
            energy = -self.evaluate(theta, batches, gradient=False).log_lik
        except Exception as error:
            if not is_outside_support(error):
                raise
            bad = [m for m in range(len(theta)) if self._raises_at(theta[m].expand_as(theta), batches)]
            raise FloatingPointError(
                f"energy raised {type(error).__name__} ({error!s:.200}) at the start of chains {bad}: chains must "
                "start inside the support. Use other starting points, or a smaller init_jitter"
            ) from error
        bad = (~energy.isfinite()).nonzero()[:, 0].tolist()
        if bad:
            chains = f"chain {bad[0]}" if len(bad) == 1 else f"chains {', '.join(map(str, bad))}"
            raise FloatingPointError(f"non-finite energy at update 1 ({chains}): {self.words.advice}")

    def _raises_at(self, theta: Tensor, batches: list[Any]) -> bool:
        try:
            self.evaluate(theta, batches, gradient=False)
        except Exception as error:
            return is_outside_support(error)
        return False

    def values(self, theta: Tensor, batches: list[Any]) -> Tensor:
        """Return U [M] at ``theta`` [M, d], NaN everywhere if the energy raises there."""
        try:
            return -self.evaluate(theta, batches, gradient=False).log_lik
        except Exception as error:
            if not is_outside_support(error):
                raise
            return theta.new_full(theta.shape[:1], torch.nan)


class EnergyOfUpdate:
    """A user's energy on the batches of one update, callable as ``core.types.Evaluate``.

    A trajectory that leaves the support stays at that point until the end of the update.
    """

    def __init__(self, objective: EnergyObjective, batches: list[Any], inside: Tensor | None) -> None:
        self._objective, self._batches, self._inside = objective, batches, inside
        self._raised: Tensor | None = None
        self._refused: Tensor | None = None

    def __call__(
        self,
        theta: Tensor,
        *,
        gradient: bool = True,
        batches: slice | None = None,
        split_rows: bool = False,
        anchor: Tensor | None = None,
    ) -> Evaluation:
        """Return minus the energy and its gradient; NaN for chains outside the support."""
        objective, chosen = self._objective, self._batches if batches is None else self._batches[batches]
        outside = torch.zeros(len(theta), dtype=torch.bool, device=theta.device)
        if self._refused is not None:
            outside = (theta == self._refused).all(1)
        try:
            found = objective.evaluate(self._kept(theta, ~outside), chosen, gradient=gradient)
        except Exception as error:
            if self._inside is None or not is_outside_support(error):
                raise
            objective.first_error = objective.first_error or error
            outside = outside | self._find_outside(theta, ~outside, chosen, gradient)
            found = objective.evaluate(self._kept(theta, ~outside), chosen, gradient=gradient)
            self._refused = torch.where(outside[:, None], theta, torch.nan)
            self._raised = outside if self._raised is None else self._raised | outside
        if anchor is not None:
            gradients = at_each_point(anchor, lambda point: objective.evaluate(point, chosen).grad_log_lik)
            found = found._replace(anchor_grad=gradients)
        if self._refused is None:
            return found
        parts = {name: value for name, value in found._asdict().items() if value is not None}
        return found._replace(**{name: _undefined(value, outside) for name, value in parts.items()})

    def info(self) -> Info:
        """Return ``energy_raised`` [M]: 1 if the energy raised at the chain. Empty if that does not reject a move."""
        if self._inside is None:
            return {}
        zeros = torch.zeros_like(self._inside[:, 0])
        return {"energy_raised": zeros if self._raised is None else self._raised.to(zeros)}

    def _find_outside(self, theta: Tensor, among: Tensor, batches: list[Any], gradient: bool) -> Tensor:
        """Return the rows of ``among`` [M] at which the energy raises, by bisection: it has raised with all of them.

        All other rows are at points inside the support, so the energy always gets M rows.
        """
        rows = among.nonzero().flatten()
        if len(rows) == 1:
            return among
        outside = torch.zeros_like(among)
        for half in rows.chunk(2):
            some = torch.zeros_like(among).index_fill(0, half, True)
            try:
                self._objective.evaluate(self._kept(theta, some), batches, gradient=gradient)
            except Exception as error:
                if not is_outside_support(error):
                    raise
                outside |= self._find_outside(theta, some, batches, gradient)
        return outside

    def _kept(self, theta: Tensor, rows: Tensor) -> Tensor:
        """Return theta in ``rows`` [M], and points inside the support in the other rows."""
        return theta if self._inside is None else torch.where(rows[:, None], theta, self._inside)


def _gradient(value: Tensor, leaf: Tensor, *, retain: bool = False) -> Tensor:
    """Return the gradient [M, d] of an energy [M] in theta."""
    (grad,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True, retain_graph=retain)
    if grad is None:
        raise ValueError(
            "energy must depend on theta: what it returned has a gradient, but of other tensors only. Compute it from "
            "the theta it is called with"
        )
    return grad


def _in_words(names: Iterable[str]) -> str:
    """Return names of results for an error."""
    return ", ".join(repr(name) if name else "a single tensor" for name in sorted(names)) or "none"


def _named(aux: Any, num_chains: int) -> dict[str, Tensor]:
    """Return by name what an energy returns beside its value: a tensor [M, ...], or a mapping of such."""
    named = dict(aux) if isinstance(aux, Mapping) else {_SINGLE: aux}
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (num_chains,):
            raise ValueError(
                f"energy may return (U, aux), with aux a tensor [M, ...] or a mapping of such, one entry for each of "
                f"{num_chains} chains; got {shape_in_words(value)}{f' for {name!r}' if name else ''}"
            )
    return named


def _mean(values: list[Tensor]) -> Tensor:
    """Return the mean of some tensors; a single one, of whatever dtype, is returned as it is."""
    return values[0].detach() if len(values) == 1 else torch.stack(values).double().mean(0).to(values[0])


def _undefined(values: Tensor, rows: Tensor) -> Tensor:
    """Return values [M, ...] with NaN in ``rows`` [M]."""
    return values.masked_fill(rows.view(-1, *[1] * (values.ndim - 1)), torch.nan)
