"""The members that predictions use: the model's own, other given members, or one process's share of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.members.member_sums import DistributedMembers, LocalMembers


class ShownMembers(NamedTuple):
    """Members that predictions use in place of the model's own.

    Attributes:
        theta: [M', d].
        group: the processes that hold the other members.
        temperature: the temperature of their mixture.
    """

    theta: Tensor
    group: LocalMembers
    temperature: float


class CurrentMembers:
    """The members that evaluation and generation use.

    Attributes:
        replacement: members in place of the model's own; None for its own.
        own_group: the processes that hold the other members while the model's own are used.
        own_temperature: the temperature of the mixture of the model's own members, see ``mixture_temperature``.
    """

    def __init__(self) -> None:
        self.replacement: ShownMembers | None = None
        self.own_group = LocalMembers()
        self.own_temperature = 1.0

    @property
    def shown(self) -> Tensor | None:
        """[M', d], the members in place of the model's own; None for its own."""
        return None if self.replacement is None else self.replacement.theta

    @property
    def group(self) -> LocalMembers:
        """The processes that hold the members."""
        return self.own_group if self.replacement is None else self.replacement.group

    @property
    def temperature(self) -> float:
        """The temperature of the mixture."""
        return self.own_temperature if self.replacement is None else self.replacement.temperature

    def show(self, theta: Tensor | None, group: LocalMembers | None, temperature: float = 1.0) -> None:
        """Use ``theta`` from now on; None switches back to the model's own members."""
        self.replacement = None if theta is None else ShownMembers(theta, group or LocalMembers(), temperature)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Undo each ``show`` of the block at its end. ``PredictionState`` gives back all that a model predicts by."""
        before = self.replacement
        try:
            yield
        finally:
            self.replacement = before


def stored_temperature(calibration: Mapping[str, Any], prediction: str, num_members: int) -> float:
    """Return the temperature of the mixture that a posterior stores, or 1 if it was fitted for another prediction.

    A temperature other than 1 that is left out gives a warning, because the predictions are then not calibrated.

    Args:
        calibration: the calibration in the posterior's config; empty without one.
        prediction: the way in which the model predicts, a name of ``gaussian_links.PREDICTIONS``.
        num_members: the number of members that it averages; 0 if it averages none.
    """
    if not calibration:
        return 1.0
    temperature, way = float(calibration["temperature"]), (calibration["prediction"], calibration["num_members"])
    if way == (prediction, num_members) or temperature == 1:
        return temperature
    warnings.warn(
        f"these predictions are not calibrated: the temperature of the mixture, {temperature:.3g}, was fitted for "
        f"{_way(*way)}, and this model predicts by {_way(prediction, num_members)}. fit_calibration(posterior, rows, "
        "prediction=..., members=...) fits one for this way. To predict without one, set calibrated=False",
        stacklevel=2,
    )
    return 1.0


def _way(prediction: str, num_members: int) -> str:
    return f"{prediction!r} with {num_members} members" if num_members else repr(prediction)


def share_of(theta: Tensor, group: Any) -> tuple[Tensor, DistributedMembers]:
    """Return this process's share of ``theta`` [M, d], and the processes that hold the other members.

    Args:
        group: a process group; None means all processes.
    Raises:
        ValueError: if the members cannot be divided evenly, or this process was not launched with others.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise ValueError(
            "members are spread over the processes of a launch, and this one has no process group: start it with "
            "accelerate launch or torchrun, and make an accelerate PartialState() first"
        )
    processes = DistributedMembers(group)
    if len(theta) % processes.size:
        raise ValueError(
            f"{len(theta)} members cannot be dealt to {processes.size} processes evenly: load another number of members"
        )
    return theta.detach().chunk(processes.size)[processes.rank].clone(), processes
