"""The two approximations of a posterior: ``Draws`` and ``Gaussian``. Both sample members theta [M, d]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.core.types import Prior
from hf_bayes.distributions.covariance import COVARIANCES, Covariance, Diagonal, log_normal, moved

GAUSSIANS = {"gaussian": "diagonal", **{f"gaussian_{kind}": kind for kind in COVARIANCES if kind != "diagonal"}}
"""The ``kind`` of a Gaussian -> the structure of its covariance."""


@dataclass(frozen=True)
class Draws:
    """S equally weighted draws from all chains.

    Attributes:
        theta: [S, d].
        chain: [S] int64, the chain of each draw.
    """

    kind: ClassVar[str] = "draws"
    theta: Tensor
    chain: Tensor

    @property
    def num_stored(self) -> int:
        """The number of stored draws S."""
        return len(self.theta)

    @property
    def rows(self) -> Tensor:
        """The rows of theta that a saved posterior holds: the draws."""
        return self.theta

    @property
    def chains(self) -> list[int]:
        """The chain of each row."""
        return [int(chain) for chain in self.chain]

    def __post_init__(self) -> None:
        if self.theta.ndim != 2 or len(self.theta) == 0:
            raise ValueError(f"Draws needs theta of shape [S >= 1, d], got {list(self.theta.shape)}")
        if self.chain.shape != self.theta.shape[:1]:
            raise ValueError(f"Draws needs a chain index per draw: got {list(self.chain.shape)} for {len(self.theta)}")

    @classmethod
    def from_chains(cls, draws: Tensor) -> Draws:
        """Build from draws [M, S, d]; the order is chain 0 draw 0, chain 0 draw 1, ..."""
        num_chains, num_draws, _ = draws.shape
        return cls(draws.flatten(0, 1), torch.arange(num_chains).repeat_interleave(num_draws))

    @property
    def mean(self) -> Tensor:
        """The mean [d] of the draws."""
        return self.theta.mean(0)

    def sample(self, num_members: int, generator: torch.Generator | None = None) -> Tensor:
        """Return [num_members, d]: all draws, or evenly spaced ones, so that all chains are represented.

        Raises:
            ValueError: if more members are requested than draws are stored. Draws are never repeated silently.
        """
        stored = len(self.theta)
        if not 1 <= num_members <= stored:
            raise ValueError(f"asked for {num_members} members, {stored} are stored: ask for 1 to {stored}")
        return self.theta[torch.arange(num_members) * stored // num_members]

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        """Return the draws of each parameter: name -> [S, ...]."""
        return {f"draws.{name}": value for name, value in layout.unflatten(self.theta).items()}

    def single(self) -> Gaussian:
        """Return the diagonal Gaussian with the moments of the draws.

        Raises:
            ValueError: if the draws do not determine a positive variance of every element.
        """
        if len(self.theta) < 2:
            raise ValueError("one draw has no variance: a Gaussian is fitted to 2 draws or more, better to many")
        std = self.theta.std(0)
        num_constant = int((std == 0).sum())
        if num_constant:
            raise ValueError(
                f"{num_constant} of {len(std)} elements are the same in all {len(self.theta)} draws: a Gaussian "
                "fitted to them would hold these elements fixed for ever. Take more draws, from chains that move"
            )
        return Gaussian.diagonal(self.mean[None], std[None])


def keep_draws(state: object, draws: Tensor) -> Draws:
    """Return all draws [M, S, d] of all chains: the usual ``Rule.finish`` of a sampler."""
    return Draws.from_chains(draws)


@dataclass(frozen=True, eq=False)
class Gaussian:
    """An equally weighted mixture of K Gaussians; K = 1 is a Gaussian.

    Attributes:
        means: [K, d], the means of the components.
        covariances: K covariances of one kind.
    """

    means: Tensor
    covariances: tuple[Covariance, ...]

    @classmethod
    def diagonal(cls, means: Tensor, stds: Tensor) -> Gaussian:
        """Build a mixture of Gaussians with independent elements from means and stds [K, d]."""
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
        """The name in a posterior's file: "gaussian" if diagonal, else "gaussian_" and the structure's name."""
        structure = self.covariances[0].kind
        return "gaussian" if structure == "diagonal" else f"gaussian_{structure}"

    @property
    def num_stored(self) -> int:
        """The number of stored draws: 0, because a Gaussian stores none."""
        return 0

    @property
    def rows(self) -> Tensor:
        """The rows of theta that a saved posterior holds: the means [K, d]."""
        return self.means

    @property
    def chains(self) -> list[int]:
        """The chain of each stored draw: empty, because a Gaussian stores none."""
        return []

    @property
    def mean(self) -> Tensor:
        """The mean [d] of the mixture."""
        return self.means.mean(0)

    @property
    def stds(self) -> Tensor:
        """The standard deviation of each element within each component, [K, d]."""
        return torch.stack([covariance.variance for covariance in self.covariances]).sqrt()

    @property
    def std(self) -> Tensor:
        """The standard deviation of each element in the mixture, [d]: within and between components."""
        return (self.stds.square().mean(0) + self.means.var(0, correction=0)).sqrt()

    def to(self, like: Tensor) -> Gaussian:
        """Return the same Gaussian in the dtype and on the device of ``like``."""
        result: Gaussian = moved(self, like)
        return result

    def sample(self, num_members: int, generator: torch.Generator | None = None) -> Tensor:
        """Return draws [num_members, d]; member i is drawn from component i mod K.

        Raises:
            ValueError: for fewer than 1.
        """
        if num_members < 1:
            raise ValueError(f"asked for {num_members} members: ask for at least 1")
        count = len(self.means)
        device = self.means.device if generator is None else generator.device
        shape = (num_members, self.means.shape[1])
        draws = torch.randn(shape, generator=generator, dtype=self.means.dtype, device=device).to(self.means.device)
        for index, (mean, covariance) in enumerate(zip(self.means, self.covariances, strict=True)):
            draws[index::count] = mean + covariance.root(draws[index::count])
        return draws

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return the normalised log-density, [M, d] -> [M]."""
        return self._component_log_probs(theta).logsumexp(1) - math.log(len(self.means))

    def grad(self, theta: Tensor) -> Tensor:
        """Return the gradient of ``log_prob``, [M, d] -> [M, d]."""
        if len(self.means) == 1:
            return self.covariances[0].precision_product(self.means - theta)
        responsibility = self._component_log_probs(theta).softmax(1)
        parts = zip(self.means, self.covariances, responsibility.unbind(1), strict=True)
        grads = [weight[:, None] * covariance.precision_product(mean - theta) for mean, covariance, weight in parts]
        return torch.stack(grads).sum(0)

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        """Return the means and covariances of K components: name -> [K, ...]."""
        means = {f"means.{name}": value for name, value in layout.unflatten(self.means).items()}
        components = [covariance.tensors(layout) for covariance in self.covariances]
        return means | {name: torch.stack([component[name] for component in components]) for name in components[0]}

    def single(self) -> Gaussian:
        """Return the Gaussian itself, or the diagonal Gaussian with the moments of a mixture."""
        if len(self.means) == 1:
            return self
        return Gaussian.diagonal(self.mean[None], self.std[None])

    def _component_log_probs(self, theta: Tensor) -> Tensor:
        if theta.shape[1] != self.means.shape[1]:  # a Gaussian over one element would be broadcast
            raise ValueError(
                f"a Gaussian over {self.means.shape[1]} elements has no density of {theta.shape[1]} elements"
            )
        components = zip(self.means, self.covariances, strict=True)
        return torch.stack([log_normal(covariance, theta - mean) for mean, covariance in components], 1)


def instead_of(prior: Prior) -> str:
    """Return the end of a message that refuses a prior: what was given, and how to give one Gaussian."""
    if isinstance(prior, Gaussian):
        return f"got a mixture of {len(prior.means)}: give one Gaussian, such as its .single()"
    return (
        f"got a {type(prior).__name__}: use prior='gaussian' in training, or give sample a standard deviation (such as "
        "prior=1.0)"
    )


def joined(parts: Sequence[Gaussian]) -> Gaussian:
    """Return the mixture of the components of all parts, with equal weights."""
    return Gaussian(torch.cat([part.means for part in parts]), tuple(c for part in parts for c in part.covariances))
