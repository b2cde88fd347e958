"""The result of ``sample``: draws, the approximation, and what was recorded on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import Tensor

from hf_bayes.chains.theta_form import Form, Theta
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.types import Approximation


@dataclass(frozen=True, repr=False)
class SampleResult(Generic[Theta]):
    """The result of ``sample``.

    Attributes:
        draws: [M, S, d] the positions of the chains, or {name: [M, S, *shape]} if theta is a dictionary. For
            ``mean_field``, ``laplace``, ``swa``, ``swag`` and ``mc_dropout`` a position is a mean, an average, or
            weights without masks. These do not have the spread of the posterior: use ``members`` or ``approximation``.
        approximation: the result of the method, ``Draws`` or ``Gaussian``, over rows [d].
        info: name -> [num_steps, M], each update's diagnostics; NaN in updates that did not report the name.
        state: the last state (a NamedTuple of tensors).
        aux: the values that the energy returned beside U at the draws, [M, S, ...] or {name: [M, S, ...]}; None if it
            returned only its value.
        report: name -> a value for each chain, from a pass over all data after the last update, if the method makes
            one. ``laplace`` reports the log evidence, the norm of the gradient, and the distance to the maximum of the
            Gaussian.
        form: the form of theta.
        method: the config of the run, with numbers in place of settings that were left open.
    """

    draws: Theta
    approximation: Approximation
    info: dict[str, Tensor]
    state: Any
    aux: Any = None
    report: dict[str, list[Any]] = field(default_factory=dict)
    form: Form[Theta] = field(default_factory=lambda: Form(None))
    method: MethodConfig | None = None

    def __repr__(self) -> str:
        """Return a few lines: method, chains and draws, shapes, and the means of the diagnostics."""
        first = next(iter(self.draws.values())) if isinstance(self.draws, dict) else self.draws
        means = ", ".join(f"{name} {_mean(values)}" for name, values in self.info.items())
        of = "" if self.method is None else f" of {self.method.name}"
        lines = [
            f"SampleResult{of}: {first.shape[0]} chains of {first.shape[1]} draws",
            f"draws: {_shapes(self.draws)}",
            f"approximation: {type(self.approximation).__name__}",
            f"info, means over updates: {means or 'none'}",
        ]
        lines += [] if self.aux is None else [f"aux: {_shapes(self.aux)}"]
        lines += [f"report: {', '.join(self.report)}"] if self.report else []
        return "\n  ".join(lines)

    def members(self, num_members: int, generator: torch.Generator | None = None) -> Theta:
        """Return draws of the approximation, [num_members, d] or {name: [num_members, *shape]}."""
        return self.form.unflatten(self.approximation.sample(num_members, generator))


def _shapes(tensors: Any) -> str:
    """Return the shape of a tensor or of each of at most 4 named tensors."""
    if isinstance(tensors, Tensor):
        return str(list(tensors.shape))
    named = [f"{name} {list(tensor.shape)}" for name, tensor in list(tensors.items())[:4]]
    return ", ".join(named) + (f" and {len(tensors) - 4} more" if len(tensors) > 4 else "")


def _mean(values: Tensor) -> str:
    """Return the mean of a diagnostic over the updates and chains that report it."""
    return f"{values.double().nanmean().item():.3g}"


def stack_info(infos: Sequence[Mapping[str, Tensor]], num_chains: int) -> dict[str, Tensor]:
    """Return name -> [num_steps, M], with NaN in updates without the name: AdamW's warm start has other names."""
    names = dict.fromkeys(name for info in infos for name in info)
    absent = torch.full((num_chains,), math.nan)
    return {
        name: torch.stack(
            [info[name] if name in info else absent.to(next(i[name] for i in infos if name in i)) for info in infos]
        )
        for name in names
    }


def stack_aux(found: list[Any]) -> Any:
    """Return the recorded values of all draws, [M, S, ...] or {name: [M, S, ...]}; None without any.

    Args:
        found: the values that the energy returned beside U, one entry for each draw, all in one form (``Aux``).
    """
    if not found:
        return None
    if isinstance(found[0], Tensor):
        return torch.stack(found, 1)
    return {name: torch.stack([each[name] for each in found], 1) for name in found[0]}
