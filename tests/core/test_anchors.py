from __future__ import annotations

import torch
from torch import Tensor

from hf_bayes.core.anchors import at_each_point


def test_points_of_a_chain_keep_their_places() -> None:
    anchor, shapes = torch.arange(24.0).view(2, 3, 4), []

    def gradient(point: Tensor) -> Tensor:
        shapes.append(tuple(point.shape))
        return -2 * point.view(-1).view(2, 4)  # an energy may rely on contiguous memory

    assert torch.equal(at_each_point(anchor, gradient), -2 * anchor)
    assert shapes == [(2, 4)] * 3
    assert torch.equal(at_each_point(anchor[:, 0], gradient), -2 * anchor[:, 0])
