"""Labels that carry further columns of the data."""

from __future__ import annotations

import pytest
import torch
from transformers import default_data_collator

from hf_bayes.objectives.label_columns import LabelColumns

ROWS = [{"input_ids": [1, 2], "label": 1, "weight": 0.5}, {"input_ids": [3, 4], "label": 0, "weight": 2.0}]


def test_columns_follow_the_labels() -> None:
    batch = LabelColumns(default_data_collator, ("weight",), "weighted")(ROWS)
    assert batch["labels"].tolist() == [[1.0, 0.5], [0.0, 2.0]]
    assert sorted(batch) == ["input_ids", "labels"]


def test_rows_without_labels_stay_without() -> None:
    rows = [{key: value for key, value in row.items() if key != "label"} for row in ROWS]
    assert sorted(LabelColumns(default_data_collator, ("weight",), "weighted")(rows)) == ["input_ids"]


def test_a_missing_column_is_named() -> None:
    rows = [{key: value for key, value in row.items() if key != "weight"} for row in ROWS]
    with pytest.raises(ValueError, match=r"weighted reads one number for each row from the column 'weight'.*no such"):
        LabelColumns(default_data_collator, ("weight",), "weighted")(rows)
    with pytest.raises(ValueError, match="got Tensor"):
        LabelColumns(lambda _: {"labels": torch.ones(2), "weight": torch.ones(2, 2)}, ("weight",), "weighted")(rows)
