"""The gradient on all training rows at given points. The gradient of a random batch estimates it without bias."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from hf_bayes.objectives.passes import PassingObjective


def gradient_of_all_rows(objective: PassingObjective, theta: Tensor, *, share: float = 1.0) -> Tensor | None:
    """Return grad log p(D | theta) [M, d], on the scale of an update's gradient.

    The result is None if the gradients of updates do not have this mean: with dropout, because of its masks; with rows
    that differ each time they are read, for the same reason; and with rows that are private to processes, because they
    are not weighted here.

    Args:
        objective: the objective of the model.
        theta: [M, d] of the chains of this process. Processes that share these chains share the rows, too.
        share: the share of the rows to take. Below 1 the result is an estimate.
    """
    model, data, scale = objective.model, objective.data, objective.scale
    drops = objective.dropout and model.members.trunk.has_dropout
    if drops or objective.private is not None or data is None or data.varies or scale.num_terms is None:
        return None
    common = copy.copy(objective)
    common.shared = True  # rows are read by number: all chains see each of them
    model.train(objective.dropout)
    # another part than that of a curvature pass: in a product of both, an error in common would not average out
    total, data = torch.zeros_like(theta), data.part(share, objective.seed + 1)
    for batch in data.batches(range(data.num_rows)[objective.mesh.data_rank :: objective.mesh.data_size]):
        # the objective has chunks for all its chains, and theta may hold fewer
        chunks = [slice(part.start, min(part.stop, len(theta))) for part in common.member_chunks(batch)]
        some = [part for part in chunks if part.start < len(theta)]
        for members, _, part, _ in common.passes(theta, batch, gradient=True, step=0, micro=0, chunks=some):
            assert part is not None
            total[members] -= part
    objective.mesh.sum_over_data(total)
    assert objective.data is not None
    gradient: Tensor = total * (scale.num_data / scale.num_terms * objective.data.num_rows / data.num_rows)
    return gradient
