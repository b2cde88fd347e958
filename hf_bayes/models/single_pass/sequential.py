"""A single pass through a plain ``nn.Sequential``, such as an MLP, without a model of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import Covariance
from hf_bayes.members.context import Context
from hf_bayes.members.stacked import stack
from hf_bayes.models.single_pass.driver import (
    STRUCTURES,
    checked_rank,
    naming_modules,
    random_forward,
    random_modules,
    settings_of,
)
from hf_bayes.models.single_pass.gaussian_tensor import GaussianTensor, mean_of

LAYERS = (
    nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Flatten, nn.Identity, nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU,
    nn.Sigmoid, nn.ELU, nn.Softplus, nn.LeakyReLU, nn.Mish,
)  # fmt: skip
"""The modules with a rule."""


@torch.no_grad()
def sequential_outputs(
    model: nn.Sequential,
    layout: Layout,
    mean: Tensor,
    covariance: Covariance,
    x: Tensor,
    *,
    structure: str = "low_rank",
    rank: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the means [B, C] and the covariances [B, C, C] of the outputs at ``x`` [B, n].

    Args:
        model: an ``nn.Sequential`` of ``LAYERS``, which may be nested. It is not changed.
        layout: the layout of the random parameters (``hf_bayes.core.layout.select``).
        mean: [d] the mean of the random parameters.
        covariance: the covariance of the random parameters.
        structure: the structure of the covariance of hidden states, one of ``driver.STRUCTURES``.
        rank: the number of columns of "low_rank"; None means ``drawn.rank_for``.
    Raises:
        ValueError: naming a module without a rule, before the pass, or for an unknown structure or rank.
    """
    if structure not in STRUCTURES:
        raise ValueError(f"structure must be one of {', '.join(STRUCTURES)}, got {structure!r}")
    columns = checked_rank(rank, covariance)
    each = _layers(model)
    for path, module in each:
        if not isinstance(module, LAYERS) or (isinstance(module, nn.Dropout) and module.training):
            raise ValueError(
                f"{path} ({type(module).__name__}): a single pass of an nn.Sequential has no rule for it. It has rules "
                f"for {', '.join(kind.__name__ for kind in LAYERS)}, and dropout in evaluation. Predict by members"
            )
    parameters = dict(model.named_parameters())
    items = stack(model, {id(parameters[name]): name for name in layout.names}, Context())
    settings, num_columns = settings_of(structure), columns if structure == "low_rank" else 0
    random = {id(item.module): item for item in random_modules(items, layout, mean, covariance, num_columns, x.device)}
    hidden: Any = x
    with naming_modules(model):
        for _, module in each:
            own = random.get(id(module))
            hidden = module(hidden) if own is None else random_forward(own, settings)(hidden)
    assert isinstance(hidden, GaussianTensor)
    return mean_of(hidden), hidden.spread.covariance()


def _layers(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Return the path and the module of each layer of nested sequences, in order. A module may stand there twice."""
    each = model.named_modules(remove_duplicate=False)
    return [(path, module) for path, module in each if not isinstance(module, nn.Sequential)]
