from __future__ import annotations

import pytest
import torch

from hf_bayes.posteriors.storage.content import bytes_in, decode, encode, size_in_bytes, texts_in


def test_the_suffix_decides_the_format() -> None:
    tensors = {"w": torch.tensor([1.0, 2.0])}
    found = decode("a.safetensors", encode("a.safetensors", tensors), where="x")
    assert torch.equal(found["w"], tensors["w"])
    assert decode("a.json", encode("a.json", {"a": [1]}), where="x") == {"a": [1]}
    assert encode("README.md", "é") == "é".encode()


def test_bytes_are_written_unchanged_under_any_suffix() -> None:
    for name in ("a.json", "a.safetensors", "a.model"):
        assert encode(name, b"{") == b"{"
    assert decode("a.model", b"{", where="x") == b"{"


def test_a_text_is_not_read_as_data() -> None:
    with pytest.raises(ValueError, match=r"some/README\.md: a text is not read as data"):
        decode("README.md", b"words", where="some/README.md")


def test_sizes_count_texts_and_tensors() -> None:
    assert [size_in_bytes(content) for content in (b"abc", "abcd", {"a": 1})] == [3, 4, 0]
    assert size_in_bytes({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64)}) == 28


def test_texts_and_bytes_are_told_from_data() -> None:
    files = {"a.md": "words", "a.model": b"{", "a.json": {"a": 1}}
    assert texts_in(files) == {"a.md": "words"}
    assert bytes_in(files) == {"a.model": b"{"}
