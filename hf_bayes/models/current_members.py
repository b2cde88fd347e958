"""The members that predictions use: the model's own, other given members, or one process's share of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.members.member_sums import DistributedMembers, LocalMembers
from hf_bayes.models.predictors import PredictedBy
from hf_bayes.posteriors.posterior import Posterior


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
    """

    def __init__(self) -> None:
        self.replacement: ShownMembers | None = None
        self.own_group = LocalMembers()

    @property
    def shown(self) -> Tensor | None:
        """[M', d], the members in place of the model's own; None for its own."""
        return None if self.replacement is None else self.replacement.theta

    @property
    def group(self) -> LocalMembers:
        """The processes that hold the members."""
        return self.own_group if self.replacement is None else self.replacement.group

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


def stored_temperature(posterior: Posterior | None, predictions: PredictedBy) -> float:
    """Return the temperature of the mixture that is stored for these predictions; 1 if there is none."""
    temperature, fitted_for = _stored(posterior)
    return temperature if fitted_for == predictions else 1.0


def warn_of_lost_temperature(posterior: Posterior | None, predictions: PredictedBy) -> None:
    """Warn if the posterior stores a temperature other than 1 that was fitted for other predictions."""
    temperature, fitted_for = _stored(posterior)
    if temperature != 1 and fitted_for != predictions:
        warnings.warn(
            f"these predictions are not calibrated: the temperature of the mixture, {temperature:.3g}, was fitted for "
            f"{fitted_for}, and this model predicts by {predictions}. fit_calibration(posterior, rows, prediction=..., "
            "members=...) fits one for this way. To predict without one, set calibrated=False",
            stacklevel=2,
        )


def _stored(posterior: Posterior | None) -> tuple[float, PredictedBy | None]:
    """Return a stored temperature and the predictions for which it was fitted; 1 and None without one."""
    calibration = {} if posterior is None else posterior.config.calibration
    if not calibration:
        return 1.0, None
    return float(calibration["temperature"]), PredictedBy(calibration["prediction"], calibration["num_members"])


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
