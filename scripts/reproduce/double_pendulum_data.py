"""The simulation of ``double_pendulum`` and its rows: positions of both masses, and earlier positions as inputs."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

LAGS = (20, 21, 22, 23, 24)  # eq. 18
STEP = 0.01
"""The seconds between two points. The paper does not give this number."""


class Rows(NamedTuple):
    """The rows of a data set: x [R, 20], y [R, 4] in metres."""

    x: Tensor
    y: Tensor

    def as_dicts(self) -> list[dict[str, Tensor]]:
        """Return the rows of a data set for a trainer."""
        return [{"input_values": x, "labels": y} for x, y in zip(*self, strict=True)]


def positions(num_points: int, *, step: float = STEP) -> np.ndarray:
    """Return [num_points, 4]: coordinates of both masses (1 kg, rods of 1 m), from rest at 120 and -10 degrees."""
    gravity = 9.81

    def velocity(_: float, state: np.ndarray) -> list[float]:
        a, b, u, v = state  # angles and angular velocities
        sine, cosine = math.sin(a - b), math.cos(a - b)
        mass = 1 + sine**2
        first = gravity * (math.sin(b) * cosine - 2 * math.sin(a)) - sine * (u**2 * cosine + v**2)
        second = 2 * (u**2 * sine - gravity * math.sin(b) + gravity * math.sin(a) * cosine) + v**2 * sine * cosine
        return [u, v, first / mass, second / mass]

    times = step * np.arange(num_points)
    start = [math.radians(120), math.radians(-10), 0.0, 0.0]
    a, b = solve_ivp(velocity, (0, times[-1]), start, method="DOP853", t_eval=times, rtol=1e-10, atol=1e-10).y[:2]
    first = np.stack([np.sin(a), -np.cos(a)], 1)
    return np.concatenate([first, first + np.stack([np.sin(b), -np.cos(b)], 1)], 1)


def pendulum(num_rows: int = 9975, num_train: int = 2992) -> tuple[Rows, Rows]:
    """Return training and test rows, split in time (section 5.2)."""
    y = torch.tensor(positions(num_rows + max(LAGS)), dtype=torch.float32)
    at = torch.arange(max(LAGS), len(y))
    x = torch.cat([y[at - lag] for lag in LAGS], 1)
    return Rows(x[:num_train], y[at[:num_train]]), Rows(x[num_train:], y[at[num_train:]])
