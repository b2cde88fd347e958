"""MC dropout: a member is a network in which some inputs of its weights are always 0 (Gal and Ghahramani 2016).

    F(theta) = E_z[U(s theta)],    s = z / (1 - p) on the weights that read an input,    z ~ Bernoulli(1 - p) per input

A weight W with a mask on its inputs, W (x z) / (1 - p), is the weight W diag(z) / (1 - p). So dropout with one mask for
all tokens is a law on theta, q(s theta). F is its variational free energy E_q[U] - H[q] without the entropy, which does
not depend on theta. AdamW (``map``) minimises F with one new mask per chain and update, from the gradient
s grad U(s theta). Members are ``num_masks`` masked rows of the last theta per chain. A member keeps its mask for all
texts and positions, so its text is coherent (Gal and Ghahramani, 2016b, tie masks over time for the same reason).

There is no stationary law. The spread of q is set by p: it is not learned from the data and does not shrink with N.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.requirements import Requirements
from hf_bayes.core.rng import generator
from hf_bayes.core.types import UNNAMED, Evaluation, Info, Problem, Rngs, Rule
from hf_bayes.distributions.approximations import Draws
from hf_bayes.distributions.energy import energy, grad_energy
from hf_bayes.methods.averaging.map import MAPConfig, MAPState, adamw, begin

LORA_INPUTS = r"\.lora_A\."
"""The weights whose inputs peft's ``lora_dropout`` drops."""


class MCDropoutState(NamedTuple):
    """The state of AdamW, the masks of this update, and the seed of the members' masks."""

    theta: Tensor
    """[M, d] weights without a mask."""
    first_moment: Tensor
    """[M, d]"""
    second_moment: Tensor
    """[M, d]"""
    step: Tensor
    """[M] int64, number of updates done."""
    kept: Tensor
    """[M, k] bool, True where this update keeps one of the k inputs of all dropped weights."""
    seed: Tensor
    """[M] int64."""


@dataclass(frozen=True, kw_only=True)
class MCDropoutConfig(MAPConfig):
    """Networks with fixed dropout masks, trained by AdamW. A chain ends in ``num_masks`` draws.

    Attributes:
        dropout: p, the probability that an input is dropped, in training and in the members.
        num_masks: number of members per chain.
        targets: regular expression on the names of the weights whose inputs are dropped. None means LoRA's A, like
            peft's ``lora_dropout``. A weight has the shape [out, in, ...], as in nn.Linear and convolutions.
    """

    name: ClassVar[str] = "mc_dropout"
    dropout: float = 0.1
    num_masks: int = 8
    targets: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("dropout", self.dropout, minimum=0.0, maximum=1.0)
        self._check_count("num_masks", self.num_masks, minimum=1)
        if self.targets is not None:
            try:
                re.compile(self.targets)
            except (TypeError, re.error) as error:
                raise ValueError(
                    f"{self.name}: targets must be a regular expression, got {self.targets!r}: {error}"
                ) from error

    @property
    def requirements(self) -> Requirements:
        setting = "" if self.targets is None else f"targets={self.targets!r}"
        return replace(super().requirements, ends_at_map=False, drops_inputs=True, tensor_names_setting=setting)

    def build(self, problem: Problem) -> Rule[MCDropoutState]:
        masks = self.masks(problem.shapes)

        def init(theta: Tensor, rngs: Rngs) -> MCDropoutState:
            seeds = [torch.randint(2**62, (), generator=rng, device=rng.device) for rng in rngs]
            kept = torch.ones(len(theta), masks.num_inputs, dtype=torch.bool, device=theta.device)
            return MCDropoutState(*begin(theta, rngs), kept, torch.stack(seeds).to(theta.device))

        def locate(state: MCDropoutState, rngs: Rngs) -> tuple[Tensor, MCDropoutState]:
            kept = torch.stack([masks.draw(rng, 1)[0] for rng in rngs]).to(state.theta.device)
            return masks.scale(kept, state.theta).mul_(state.theta), state._replace(kept=kept)

        def update(state: MCDropoutState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[MCDropoutState, Info]:
            scale = masks.scale(state.kept, state.theta)
            located, weight = scale * state.theta, self.prior_weight
            gradient = grad_energy(evaluation, located, problem.prior, prior_weight=weight).mul_(scale)
            adam = MAPState(state.theta, state.first_moment, state.second_moment, state.step)
            new = adamw(adam, gradient, lr, momentum=self.momentum, num_data=problem.num_data)
            info = {"energy": energy(evaluation, located, problem.prior, prior_weight=weight)}
            return MCDropoutState(*new, state.kept, state.seed), info

        def finish(state: MCDropoutState, draws: Tensor) -> Draws:
            return Draws.from_chains(self.members(draws[:, -1], masks, state.seed.tolist()))

        return Rule(init, locate, update, finish)

    def masks(self, shapes: Mapping[str, tuple[int, ...]]) -> Masks:
        """Return the masks for tensors with these names and ``shapes``.

        Without names, every element of theta is a weight with its own input.

        Raises:
            ValueError: if no name matches, if a matched tensor has no inputs, or if DoRA would include the dropped
                inputs in the norm of a weight.
        """
        if UNNAMED in shapes:
            return Masks(self.dropout, ((shapes[UNNAMED], True),))
        pattern = LORA_INPUTS if self.targets is None else self.targets
        chosen = [name for name in shapes if re.search(pattern, name)]
        if not chosen:
            raise ValueError(
                f"{self.name} drops the inputs of weights named by {pattern!r}, and no random tensor is: add LoRA, or "
                f"set targets to a regular expression for weights [out, in] among {', '.join(list(shapes)[:4])}, ..."
            )
        flat = [name for name in chosen if len(shapes[name]) < 2]
        if flat:
            raise ValueError(
                f"{self.name}: targets={self.targets!r} names {flat[0]} of shape {list(shapes[flat[0]])}, which reads "
                "no inputs: name weights [out, in] only"
            )
        normed = next((name for name in shapes if "lora_magnitude_vector" in name), None)
        if normed is not None:
            raise ValueError(
                f"{self.name} cannot drop inputs under DoRA ({normed}): the norm of the weight would change with the "
                "mask. Use a plain LoRA (use_dora=False)"
            )
        return Masks(self.dropout, tuple((shape, name in chosen) for name, shape in shapes.items()))

    def members(self, theta: Tensor, masks: Masks, seeds: list[int]) -> Tensor:
        """Return theta [M, d] under random masks, [M, num_masks, d]; each row has its own seed."""
        rows = zip(theta, seeds, strict=True)
        kept = ((row, masks.draw(generator(seed, "masks"), self.num_masks)) for row, seed in rows)
        return torch.stack([masks.scale(mask.to(row.device), row) * row for row, mask in kept])


class Masks(NamedTuple):
    """The inputs that can be dropped, k in total."""

    dropout: float
    """p"""
    tensors: tuple[tuple[tuple[int, ...], bool], ...]
    """The shape of each random tensor, and True if its inputs are dropped. A vector has one input per element."""

    @property
    def num_inputs(self) -> int:
        """k"""
        return sum(_inputs(shape) for shape, dropped in self.tensors if dropped)

    def draw(self, rng: torch.Generator, count: int) -> Tensor:
        """Return random masks [count, k] bool, True for kept inputs."""
        return torch.rand(count, self.num_inputs, generator=rng, device=rng.device) >= self.dropout

    def scale(self, kept: Tensor, like: Tensor) -> Tensor:
        """Return the factors [count, d] of theta: 0 or 1 / (1 - p) where inputs are dropped, 1 elsewhere.

        Args:
            kept: [count, k] masks.
            like: a tensor with the dtype and device of the result.
        """
        count, begin = len(kept), 0
        scale = like.new_empty(count, sum(math.prod(shape) for shape, _ in self.tensors))
        parts = scale.split([math.prod(shape) for shape, _ in self.tensors], 1)
        for (shape, dropped), part in zip(self.tensors, parts, strict=True):
            if not dropped:
                part.fill_(1)
                continue
            of_inputs = kept[:, begin : begin + _inputs(shape)]
            begin += _inputs(shape)
            if len(shape) > 1:
                of_inputs = of_inputs.view(count, 1, shape[1], *[1] * (len(shape) - 2))
            part.unflatten(1, shape).copy_(of_inputs).div_(1 - self.dropout)
        return scale


def _inputs(shape: tuple[int, ...]) -> int:
    return shape[1] if len(shape) > 1 else math.prod(shape)
