"""The running statistics of batch normalisation for each member, re-estimated by a pass over rows of the data.

The weights of a draw have never been trained with the running statistics of the model. So a pass over the training rows
estimates statistics for the draw, as stochastic weight averaging does (Izmailov et al. 2018, section 3.2;
``torch.optim.swa_utils.update_bn``): every layer normalises by the statistics of the batch, and the means and unbiased
variances of the batches are averaged. They are part of the prediction, like the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.members.inputs import num_rows_of, without_labels
from hf_bayes.models.base import BayesianModel


def with_batch_norm_statistics(
    model: BayesianModel,
    theta: Tensor,
    batches: Iterable[dict[str, Any]],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Return members [M, d] with their statistics behind the random parameters, [M, d + s].

    Without random batch normalisation, ``theta`` is returned as it is. Dropout is off. Every member has the same rows.

    Args:
        theta: [M, d] in any place; the result is in the same place.
        batches: prepared rows of the data. A batch has a weight in proportion to its number of rows.
        context: entered around forwards, for autocast.
    Raises:
        ValueError: if there are no batches.
    """
    members = model.members
    if not members.batch_norms or theta.shape[1] == members.complete_layout.dim:
        return theta
    sums = {name: theta.new_zeros(len(theta), *shape) for name, shape in members.statistics.named_shapes.items()}
    num_rows = 0
    with torch.no_grad(), evaluating(model), members.by_batch_statistics(), context():
        for batch in batches:
            inputs = without_labels(batch)
            rows = num_rows_of(inputs)
            size = model.members_per_pass or members.pass_size(len(theta), rows, model.num_positions(inputs))
            for start in range(0, len(theta), size):
                some = slice(start, start + size)
                for name, value in _of_pass(model, theta[some].to(model.device), inputs).items():
                    sums[name][some] += rows * value.to(sums[name])
            num_rows += rows
    if num_rows == 0:
        raise ValueError("there are no rows to estimate the statistics of batch normalisation from")
    return torch.cat([theta, members.statistics.flatten(sums) / num_rows], 1)


def _of_pass(model: BayesianModel, theta: Tensor, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the statistics of each member's rows, {name: [m, C]}."""
    members, found = model.members, dict[str, Tensor]()
    for item in members.batch_norms:
        item.collects = True
    try:
        with members.bind(theta):
            members.logits(inputs)
        for item in members.batch_norms:
            assert item.collected is not None
            found |= dict(zip(item.statistics, item.collected, strict=True))
    finally:
        for item in members.batch_norms:
            item.collects, item.collected = False, None
    return found
