"""What a run ends in: draws, or a Gaussian. Both fill the member axis; neither knows a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """S equally weighted draws of all chains.

    Attributes:
        theta: [S, d].
        chain: [S] int64, the chain each draw came from.
    """

    kind: ClassVar[str] = "draws"
    theta: Tensor
    chain: Tensor

    @property
    def num_stored(self) -> int:
        """S"""
        return len(self.theta)

    def __post_init__(self) -> None:
        if self.theta.ndim != 2 or len(self.theta) == 0:
            raise ValueError(f"Draws needs theta of shape [S >= 1, d], got {list(self.theta.shape)}")
        if self.chain.shape != self.theta.shape[:1]:
            raise ValueError(f"Draws needs a chain index per draw: got {list(self.chain.shape)} for {len(self.theta)}")

    @classmethod
    def from_chains(cls, draws: Tensor) -> Draws:
        """[M, S, d] -> draws in the order chain 0 draw 0, chain 0 draw 1, ..."""
        num_chains, num_draws, _ = draws.shape
        return cls(draws.flatten(0, 1), torch.arange(num_chains).repeat_interleave(num_draws))

    @property
    def mean(self) -> Tensor:
        """[d]"""
        return self.theta.mean(0)

    def sample(self, num_members: int, generator: torch.Generator | None = None) -> Tensor:
        """[num_members, d]: all draws, or as many spread evenly over them (over all chains).

        Raises:
            ValueError: if more are asked for than are stored; draws are never repeated silently.
        """
        stored = len(self.theta)
        if not 1 <= num_members <= stored:
            raise ValueError(f"asked for {num_members} members, {stored} are stored: ask for 1 to {stored}")
        return self.theta[torch.arange(num_members) * stored // num_members]


@dataclass(frozen=True)
class Gaussian:
    """An equally weighted mixture of K diagonal Gaussians; K = 1 is a Gaussian.

    Attributes:
        means: [K, d].
        stds: [K, d], positive.
    """

    kind: ClassVar[str] = "gaussian"
    means: Tensor
    stds: Tensor

    @property
    def num_stored(self) -> int:
        """0: a Gaussian stores no draws."""
        return 0

    def __post_init__(self) -> None:
        if self.means.ndim != 2 or self.means.shape != self.stds.shape:
            raise ValueError(
                f"Gaussian needs means and stds of one shape [K, d], got {list(self.means.shape)} and "
                f"{list(self.stds.shape)}"
            )
        if not bool((self.stds > 0).all()):
            raise ValueError("Gaussian needs positive stds")

    @property
    def mean(self) -> Tensor:
        """[d]"""
        return self.means.mean(0)

    def sample(self, num_members: int, generator: torch.Generator | None = None) -> Tensor:
        """[num_members, d]: member i from component i mod K."""
        component = torch.arange(num_members, device=self.means.device) % len(self.means)
        noise = torch.randn(
            (num_members, self.means.shape[1]), generator=generator, dtype=self.means.dtype, device=self.means.device
        )
        return self.means[component] + self.stds[component] * noise

    def log_prob(self, theta: Tensor) -> Tensor:
        """[M, d] -> [M], normalised."""
        return self._component_log_probs(theta).logsumexp(1) - math.log(len(self.means))

    def grad(self, theta: Tensor) -> Tensor:
        """[M, d] -> [M, d], the gradient of ``log_prob``."""
        responsibility = self._component_log_probs(theta).softmax(1)
        own = (self.means - theta[:, None]) / self.stds.square()
        return (responsibility[..., None] * own).sum(1)

    def _component_log_probs(self, theta: Tensor) -> Tensor:
        z = (theta[:, None] - self.means) / self.stds
        return -0.5 * z.square().sum(-1) - self.stds.log().sum(-1) - 0.5 * theta.shape[1] * math.log(2 * math.pi)
