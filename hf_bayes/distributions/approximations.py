"""What a run ends in: draws, or a Gaussian. Both fill the member axis; neither knows a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.distributions.covariance import COVARIANCES, Covariance, Diagonal, log_normal, moved

GAUSSIANS = {"gaussian": "diagonal", **{f"gaussian_{kind}": kind for kind in COVARIANCES if kind != "diagonal"}}
"""What a Gaussian calls itself -> the structure of its covariance."""


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


@dataclass(frozen=True, eq=False)
class Gaussian:
    """An equally weighted mixture of K Gaussians; K = 1 is a Gaussian.

    Attributes:
        means: [K, d].
        covariances: K of one kind.
    """

    means: Tensor
    covariances: tuple[Covariance, ...]

    @classmethod
    def diagonal(cls, means: Tensor, stds: Tensor) -> Gaussian:
        """Of independent elements: means and stds [K, d]."""
        if means.ndim != 2 or means.shape != stds.shape:
            raise ValueError(
                f"Gaussian needs means and stds of one shape [K, d], got {list(means.shape)} and {list(stds.shape)}"
            )
        return cls(means, tuple(Diagonal(std) for std in stds))

    def __post_init__(self) -> None:
        kinds, sizes = {c.kind for c in self.covariances}, [c.dim for c in self.covariances]
        if self.means.ndim != 2 or sizes != [self.means.shape[1]] * len(self.means) or len(kinds) != 1:
            raise ValueError(
                f"Gaussian needs means [K, d] and K covariances of one kind over d elements, got "
                f"{list(self.means.shape)} and {sorted(kinds)} over {sizes}"
            )

    @property
    def kind(self) -> str:
        """As the posterior's file names it: "gaussian" of a diagonal one, else with the structure's name behind."""
        structure = self.covariances[0].kind
        return "gaussian" if structure == "diagonal" else f"gaussian_{structure}"

    @property
    def num_stored(self) -> int:
        """0: a Gaussian stores no draws."""
        return 0

    @property
    def mean(self) -> Tensor:
        """[d]"""
        return self.means.mean(0)

    @property
    def stds(self) -> Tensor:
        """[K, d]: of each element, within each component."""
        return torch.stack([covariance.variance for covariance in self.covariances]).sqrt()

    @property
    def std(self) -> Tensor:
        """[d]: of each element, within and between components."""
        return (self.stds.square().mean(0) + self.means.var(0, correction=0)).sqrt()

    def to(self, like: Tensor) -> Gaussian:
        """The same in the dtype and on the device of ``like``."""
        return moved(self, like)

    def sample(self, num_members: int, generator: torch.Generator | None = None) -> Tensor:
        """[num_members, d]: member i from component i mod K."""
        count = len(self.means)
        device = self.means.device if generator is None else generator.device
        shape = (num_members, self.means.shape[1])
        draws = torch.randn(shape, generator=generator, dtype=self.means.dtype, device=device).to(self.means.device)
        for index, (mean, covariance) in enumerate(zip(self.means, self.covariances, strict=True)):
            draws[index::count] = mean + covariance.root(draws[index::count])
        return draws

    def log_prob(self, theta: Tensor) -> Tensor:
        """[M, d] -> [M], normalised."""
        return self._component_log_probs(theta).logsumexp(1) - math.log(len(self.means))

    def grad(self, theta: Tensor) -> Tensor:
        """[M, d] -> [M, d], the gradient of ``log_prob``."""
        if len(self.means) == 1:
            return self.covariances[0].precision_product(self.means - theta)
        responsibility = self._component_log_probs(theta).softmax(1)
        parts = zip(self.means, self.covariances, responsibility.unbind(1), strict=True)
        pulls = [share[:, None] * covariance.precision_product(mean - theta) for mean, covariance, share in parts]
        return torch.stack(pulls).sum(0)

    def _component_log_probs(self, theta: Tensor) -> Tensor:
        components = zip(self.means, self.covariances, strict=True)
        return torch.stack([log_normal(covariance, theta - mean) for mean, covariance in components], 1)


def single(approximation: Draws | Gaussian) -> Gaussian:
    """One Gaussian: itself, or the diagonal one with the moments of the draws or of the mixture.

    Raises:
        ValueError: for draws that do not tell a variance of every element.
    """
    if isinstance(approximation, Gaussian):
        if len(approximation.means) == 1:
            return approximation
        return Gaussian.diagonal(approximation.mean[None], approximation.std[None])
    if len(approximation.theta) < 2:
        raise ValueError("one draw has no spread: a Gaussian is fitted to 2 draws or more, better to many")
    std = approximation.theta.std(0)
    still = int((std == 0).sum())
    if still:
        raise ValueError(
            f"{still} of {len(std)} elements are the same in all {len(approximation.theta)} draws: a Gaussian fitted "
            "to them would hold these fixed for ever. Take more draws, from chains that move"
        )
    return Gaussian.diagonal(approximation.mean[None], std[None])


def joined(parts: Sequence[Gaussian]) -> Gaussian:
    """The mixture of all components, each of one weight."""
    return Gaussian(torch.cat([part.means for part in parts]), tuple(c for part in parts for c in part.covariances))
