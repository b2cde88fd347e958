"""The gradient on all training rows at given points. The gradient of a random batch estimates it without bias."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_bayes.objectives.data_access import DataAccess
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.passes import MemberPasses


def gradient_of_all_rows(
    passes: MemberPasses, theta: Tensor, data: DataAccess, scale: DataScale, *, share: float = 1.0
) -> Tensor | None:
    """Return grad log p(D | theta) [M, d], on the scale of an update's gradient.

    The result is None if the gradients of updates do not have this mean: with dropout, because of its masks; and with
    rows that differ each time they are read, for the same reason.

    Args:
        passes: the passes of updates. Here all chains see the same rows, even if they do not in updates.
        theta: [M, d], a point for each chain of this process. Processes that share these chains share the rows, too.
        data: the training rows by number.
        scale: the size of the data; without its number of terms the result is None.
        share: the share of the rows to take. Below 1 the result is an estimate.
    """
    model, mesh, all_rows = passes.model, passes.mesh, data
    drops = passes.dropout and model.members.trunk.has_dropout
    if drops or data.varies or scale.num_terms is None:
        return None
    common = replace(passes, shared=True)  # rows are read by number: all chains see each of them
    model.train(passes.dropout)
    # another part than that of a curvature pass: in a product of both, an error in common would not average out
    total, data = torch.zeros_like(theta), data.part(share, passes.seed + 1)
    for batch in data.batches(range(data.num_rows)[mesh.data_rank :: mesh.data_size]):
        # the passes have chunks for all chains, and theta may hold fewer
        chunks = [slice(part.start, min(part.stop, len(theta))) for part in common.member_chunks(batch)]
        some = [part for part in chunks if part.start < len(theta)]
        for members, _, part, _ in common.of_batch(theta, batch, gradient=True, step=0, micro=0, chunks=some):
            assert part is not None
            total[members] -= part
    mesh.sum_over_data(total)
    gradient: Tensor = total * (scale.num_data / scale.num_terms * all_rows.num_rows / data.num_rows)
    return gradient
