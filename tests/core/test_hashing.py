from __future__ import annotations

import pytest
import torch

from hf_bayes.core.hashing import MAX_ELEMENTS, fingerprint_json, fingerprint_tensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2])}


@pytest.mark.parametrize(
    "other",
    [
        {**TENSORS, "a": TENSORS["a"] + torch.tensor([[0, 0, 0], [0, 0, 1e-6]])},
        {**TENSORS, "a": TENSORS["a"].view(3, 2)},
        {**TENSORS, "a": TENSORS["a"].double()},
        {"c": TENSORS["a"], "b": TENSORS["b"]},
        {"a": TENSORS["a"]},
    ],
    ids=["a value", "a shape", "a dtype", "a name", "a tensor less"],
)
def test_fingerprints_differ_by(other: dict[str, torch.Tensor]) -> None:
    assert fingerprint_tensors(other.items()) != fingerprint_tensors(TENSORS.items())


def test_fingerprints_do_not_depend_on_order_or_memory_layout() -> None:
    turned = {"b": TENSORS["b"], "a": TENSORS["a"].T.contiguous().T}
    assert fingerprint_tensors(turned.items()) == fingerprint_tensors(TENSORS.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.bool, torch.float64], ids=str)
def test_every_dtype_has_a_fingerprint(dtype: torch.dtype) -> None:
    assert len(fingerprint_tensors([("a", torch.ones(3, dtype=dtype)), ("scalar", torch.tensor(1.0))])) == 64


def test_a_single_element_of_a_row_has_a_fingerprint() -> None:
    row = torch.arange(4.0)[None]  # the column of a scalar parameter has the stride of the row
    assert fingerprint_tensors([("a", row[:, 2])]) == fingerprint_tensors([("a", torch.tensor([2.0]))])


def test_large_tensors_are_hashed_where_they_are_spread() -> None:
    large = torch.zeros(MAX_ELEMENTS + 1)
    before = fingerprint_tensors([("large", large)])
    large[::2] = 1
    assert fingerprint_tensors([("large", large)]) != before


def test_json_fingerprints_do_not_depend_on_the_order_of_keys() -> None:
    assert fingerprint_json({"a": 1, "b": [2]}) == fingerprint_json({"b": [2], "a": 1})
    assert fingerprint_json({"a": 1}) != fingerprint_json({"a": 2})
