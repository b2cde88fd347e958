"""A single pass through a live model: its own code runs on tensors that carry a mean and a covariance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_bayes.core.layout import Layout
from hf_bayes.core.number_checks import is_count
from hf_bayes.distributions.covariance import Covariance, moved
from hf_bayes.members.compat.transformers import attention_of
from hf_bayes.members.engine import Members
from hf_bayes.members.stacked_module import Stacked
from hf_bayes.models.single_pass.diagonal import DiagonalSpread
from hf_bayes.models.single_pass.drawn import draws_of, leading_columns, rank_for
from hf_bayes.models.single_pass.factors import Factors, NoiseSources
from hf_bayes.models.single_pass.gaussian_tensor import GaussianTensor, NoRule, mean_of, spread_of
from hf_bayes.models.single_pass.installed import RandomLinear, frozen_forward, joined, random_module
from hf_bayes.models.single_pass.tangents import Tangents
from hf_bayes.models.single_pass.weight_laws import parts_of

STRUCTURES = ("low_rank", "diagonal", "full")
"""The structures of the covariance of hidden states."""

ATTENTION = (None, "eager", "sdpa")
"""Implementations of attention for which there are rules."""


class SinglePass:
    """The replacement of a model's random members by one Gaussian N(mean, covariance) over its parameters.

    Args:
        members: the member engine of the model.
        mean: [d].
        covariance: the covariance of theta. "diagonal" and "full" drop the covariance between different layers.
        structure: "low_rank", "diagonal" (without the covariance between units), or "full" for small models.
        rank: the number of columns of "low_rank"; None means ``drawn.rank_for``.
        deterministic_scores: True to take queries and keys at their means, as the paper does (eq. 59).
        factors: {path of a module: calibration factor of its noise}; 1 where none is given.
        second_order: True to add the second order in the noise to the mean ("low_rank" only): see ``second_order``.
    Raises:
        ValueError: naming a module or a structure without a rule.
    """

    def __init__(
        self,
        members: Members,
        mean: Tensor,
        covariance: Covariance,
        *,
        structure: str = "low_rank",
        rank: int | None = None,
        deterministic_scores: bool = False,
        factors: Mapping[str, float] | None = None,
        second_order: bool = False,
    ) -> None:
        if structure not in STRUCTURES:
            raise ValueError(f"structure must be one of {', '.join(STRUCTURES)}, got {structure!r}")
        if second_order and structure != "low_rank":
            raise ValueError(
                f"second_order needs structure='low_rank', got {structure!r}: leave it out, or choose 'low_rank'"
            )
        rank = checked_rank(rank, covariance)
        if (attention := attention_of(members.core.config)) not in ATTENTION:
            raise ValueError(
                f"a single pass has rules for the attention implementations eager and sdpa, got {attention!r}: load "
                "the base model with attn_implementation='sdpa', or predict by members"
            )
        self.members, self.structure, self.deterministic_scores = members, structure, deterministic_scores
        self.rank, self.second_order = rank, second_order
        self.of_weights, self.num_drawn = (mean, covariance), rank if structure == "low_rank" else 0
        self.num_leading = len(leading_columns(covariance, self.num_drawn)[0])
        self._replace_random()
        self.set_factors(factors or {})
        random = {id(item.module) for item in members.stacked}
        others = [(m, frozen_forward(m)) for m in members.model.modules() if id(m) not in random]
        self.frozen = [(module, forward) for module, forward in others if forward is not None]

    def _replace_random(self) -> None:
        members, self.place = self.members, self._place_of_model()
        self.random = random_modules(
            members.stacked, members.layout, *self.of_weights, self.num_drawn, device=self.place[0]
        )

    def _place_of_model(self) -> tuple[torch.device, torch.dtype]:
        like = next(self.members.core.parameters())
        return like.device, like.dtype

    @property
    def paths(self) -> list[str]:
        """The paths of the modules with random weights, in the order of the model."""
        return [module.path for module in self.random]

    def set_factors(self, factors: Mapping[str, float]) -> None:
        """Set the calibration factors of layers; layers that are not named get 1.

        Raises:
            ValueError: for a layer without random weights.
        """
        if unknown := sorted(set(factors) - set(self.paths)):
            raise ValueError(f"calibration factors of layers that are not random: {unknown}. Calibrate again")
        for module in self.random:
            module.factor = float(factors.get(module.path, 1.0))

    def mean(self, outputs: GaussianTensor) -> Tensor:
        """Return the mean of outputs: that of the mean weights, or with ``second_order`` the expected one."""
        found: Tensor = mean_of(outputs)
        return found + outputs.spread.drift.to(found.dtype) if self.second_order else found

    @contextmanager
    def open(self) -> Iterator[None]:
        """Within the block, the model computes moments. Afterwards its members are back."""
        members, context = self.members, self.members.context
        members.require_attached()
        if self.place != self._place_of_model():  # the model was moved
            factors = {module.path: module.factor for module in self.random}
            self._replace_random()
            self.set_factors(factors)
        bound = context.tensors, context.num_members
        for item in members.stacked:
            item.remove()
        members.blocked.remove()
        settings = settings_of(
            self.structure,
            self.num_leading,
            deterministic_scores=self.deterministic_scores,
            num_rows=lambda: context.num_rows,
        )
        replaced = [(module, vars(module).get("forward")) for module, _ in self.frozen]
        try:
            context.tensors, context.num_members = {}, 1
            for item in self.random:
                item.module.forward = random_forward(item, settings)
            for module, forward in self.frozen:
                module.forward = forward
            yield
        finally:
            for item in self.random:
                vars(item.module).pop("forward", None)
            for module, before in replaced:
                vars(module).pop("forward", None)
                if before is not None:
                    module.forward = before
            context.tensors, context.num_members = bound
            for stacked in members.stacked:
                stacked.install()
            members.blocked.install()


def random_modules(
    items: Iterable[Stacked], layout: Layout, mean: Tensor, covariance: Covariance, rank: int, device: torch.device
) -> list[Any]:
    """Return the replacements of modules with random weights.

    Args:
        items: the modules.
        layout: the layout of their random parameters.
        mean, covariance: the mean [d] and the covariance of the random parameters.
        rank: the number of columns of the structure "low_rank"; 0 for the others.
        device: the device of the modules; the Gaussian of a posterior is on the CPU, whatever the model is on.
    Raises:
        ValueError: naming a module without a rule.
    """
    draws = draws_of(covariance, layout, rank) if rank else {}
    columns, remainder = leading_columns(covariance, rank)
    values, parts = layout.unflatten(mean.detach()), parts_of(moved(remainder, device), layout)
    items = list(items)
    found = [random_module(item, values, parts, 1.0, draws, len(columns)) for item in items]
    uses = Counter(name for item in items for name in item.names.values())
    for item, one in zip(items, found, strict=True):
        if isinstance(one, RandomLinear) and any(uses[name] > 1 for name in item.names.values()):  # tied to embeddings
            one.law = replace(one.law, correlated=True)
    return joined(found)


def checked_rank(rank: Any, covariance: Covariance) -> int:
    """Return the number of columns of "low_rank"; None means ``drawn.rank_for``.

    Raises:
        ValueError: if it is not a whole number of at least 1.
    """
    rank = rank_for(covariance) if rank is None else rank
    if not is_count(rank):
        raise ValueError(f"rank must be a whole number of at least 1, got {rank!r}: give one, or leave it out")
    return int(rank)


def settings_of(
    structure: str,
    num_leading: int = 0,
    *,
    deterministic_scores: bool = False,
    num_rows: Callable[[], int] | None = None,
) -> Any:
    """Return a spread without noise, which has the settings of a pass; ``num_rows`` is as of ``NoiseSources``."""
    empty = torch.zeros(0)
    if structure == "low_rank":
        return Tangents(None, None, deterministic_scores, num_leading)
    if structure == "full":
        return Factors(empty, NoiseSources(num_rows), deterministic_scores)
    return DiagonalSpread(empty, None, None, deterministic_scores)


def random_forward(item: Any, settings: Any) -> Callable[..., GaussianTensor]:
    """Return the forward of a module with random weights during a pass."""

    def forward(x: Any, *args: Any, **kwargs: Any) -> GaussianTensor:
        plain = mean_of(x)
        return GaussianTensor.of(item.mean(plain), item.spread(plain, spread_of(x), settings))

    return forward


# -- faults, by name ---------------------------------------------------------------------------------------------------


@contextmanager
def naming_modules(model: nn.Module) -> Iterator[None]:
    """Within the block, an operation without a rule is reported with the module that uses it."""
    entered: list[tuple[str, nn.Module]] = []
    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(_entering(entered, path)))
        handles.append(module.register_forward_hook(_leaving(entered)))
    try:
        yield
    except NoRule as error:
        path, module = entered[-1] if entered else ("the model", model)
        raise ValueError(
            f"{path or 'the model'} ({type(module).__module__}.{type(module).__name__}): a single pass has no rule for "
            f"{error.what}, which it applies to an uncertain tensor. {_remedies(error, module)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _remedies(error: NoRule, module: nn.Module) -> str:
    """Return what to do about an operation without a rule."""
    found = ["Predict by members", "choose a subspace behind it"]
    if type(module).__name__.endswith("Experts"):  # low_rank has rules for the operations of batched_mm only
        found.append("load the model with experts_implementation='batched_mm', which has rules")
    if not isinstance(error.spread, Tangents):
        found.append("structure='low_rank', which has rules for most operations")
    return f"{', '.join(found[:-1])}, or {found[-1]}"


@contextmanager
def checking_variances(model: nn.Module) -> Iterator[None]:
    """Within the block, the first module whose output has a variance that is negative or not finite is reported."""
    handles = [module.register_forward_hook(_checking(path)) for path, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_sound(spread: Any) -> bool:
    """Check that all variances are finite and not negative."""
    variance = spread.variance
    return bool(((variance >= 0) & (variance < float("inf"))).all())


def _entering(entered: list[tuple[str, nn.Module]], path: str) -> Callable[..., None]:
    return lambda module, args: entered.append((path, module))


def _leaving(entered: list[tuple[str, nn.Module]]) -> Callable[..., None]:
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        entered.pop()

    return leave


def _checking(path: str) -> Callable[..., None]:
    def check(module: nn.Module, args: Any, output: Any) -> None:
        spread = spread_of(output)
        if spread is not None and not is_sound(spread):
            variance = spread.variance
            bad = int((~((variance >= 0) & (variance < float("inf")))).sum())
            raise ValueError(
                f"{path or 'the model'} ({type(module).__name__}): {bad} of {variance.numel()} variances of its output "
                "are negative or not finite in a single pass: the model or its posterior has diverged, or the "
                "posterior is too wide for float32. Predict by members, or fit a smaller posterior (a larger prior "
                "precision)"
            )

    return check
