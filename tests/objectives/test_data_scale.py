from __future__ import annotations

import torch

from hf_bayes.objectives.data_scale import DataScale


def test_a_stream_scales_by_the_terms_of_the_update() -> None:
    scale = DataScale(100.0, num_rows=None, num_terms=None, rows_per_update=8)
    assert scale.factor(torch.tensor([4.0, 8.0])).tolist() == [25.0, 12.5]
    assert scale.update_fraction is None


def test_an_update_is_a_share_of_the_rows() -> None:
    assert DataScale(100.0, num_rows=32, num_terms=64, rows_per_update=8).update_fraction == 0.25
