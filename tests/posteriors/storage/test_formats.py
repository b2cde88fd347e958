from __future__ import annotations

import struct

import pytest
import torch

from hf_bayes.posteriors.storage.formats import (
    bytes_in,
    decode,
    decode_json,
    decode_tensors,
    encode,
    encode_json,
    encode_tensors,
    size_in_bytes,
    texts_in,
)

TENSORS = {
    "double": torch.randn(3, 2, dtype=torch.float64),
    "single": torch.randn(4),
    "half": torch.randn(2, 2).bfloat16(),
    "count": torch.tensor([1, 2**40]),
    "state": torch.arange(5, dtype=torch.uint8),
    "flag": torch.tensor([True, False]),
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "transposed": torch.randn(3, 2).T,
}


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


def test_tensors_of_every_dtype_come_back_bit_for_bit() -> None:
    back = decode_tensors(encode_tensors(TENSORS, where="x"), where="x")
    assert back.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_equal_tensors_give_equal_bytes_even_as_views() -> None:
    row = torch.arange(6.0)
    views = {"a": row[:3], "b": row[2:5]}
    assert encode_tensors(views, where="x") == encode_tensors({k: v.clone() for k, v in views.items()}, where="x")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_tensors_that_are_not_finite_are_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match=r"file: weight holds 1 values that are NaN or infinite \(of 3\)"):
        encode_tensors({"weight": torch.tensor([0.0, value, 1.0])}, where="file")


def file_with(header: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + data


ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes"),
        (struct.pack("<Q", 2**60) + b"{}", "header of"),
        (file_with(f'{{"w":{ENTRY},"w":{ENTRY}}}', bytes(4)), "key given twice: 'w'"),
        (file_with('{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1}}', bytes(4)), "must have dtype"),
        (file_with(f'{{"w":{ENTRY.replace("F32", "F8_E4M3")}}}', bytes(4)), "dtype 'F8_E4M3'"),
        (file_with(f'{{"w":{ENTRY}}}', bytes(8)), "not a valid safetensors file"),
        (file_with(f'{{"w":{ENTRY}}}', struct.pack("<f", float("nan"))), "w holds 1 values"),
        (file_with("[1]"), "must hold a JSON object"),
    ],
)
def test_tensor_files_that_are_malformed_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        decode_tensors(data, where="some/file")
    assert "some/file" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ['{"a": 1, "a": 2}', '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', "[1]", "", "{", '{"a":' * 10**5, "\ufeff{}"],
)
def test_json_that_is_ambiguous_or_not_finite_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="some/file"):
        decode_json(text.encode(), where="some/file")


def test_json_comes_back_equal() -> None:
    value = {"text": "nöt ascii", "number": 0.1, "list": [1, None, True], "object": {"a": {}}}
    assert decode_json(encode_json(value, where="x"), where="x") == value


def test_writing_nan_to_json_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config\.json cannot be written"):
        encode_json({"a": float("nan")}, where="config.json")


@pytest.mark.parametrize("depth", [65, 300, 900, 100_000])
def test_json_that_is_nested_deep_is_refused_in_words(depth: int) -> None:
    text = '{"a":' * depth + "1" + "}" * depth
    with pytest.raises(ValueError, match=r"some/file nests lists and objects more than 64 deep: refused"):
        decode_json(text.encode(), where="some/file")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a":[' + "[]," * 100_000 + "[]]}", "100,003 lists and objects, expected at most 100,000"),
        ('{"a":[' + "1," * 2_000_001 + "1]}", "2,000,001 values, expected at most 2,000,000"),
        ('{"a":"' + "x" * 2**24 + '"}', "bytes, expected at most 16,777,216"),
    ],
)
def test_json_that_would_fill_memory_is_refused_before_parsing(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"some/file is a JSON of .*{words}"):
        decode_json(text.encode(), where="some/file")


def test_tensors_are_compared_with_the_header_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_tensors({"w": torch.ones(2)}, where="x")
    assert decode_tensors(data, where="x", shapes={"w": (2,)}).keys() == {"w"}
    monkeypatch.setattr("hf_bayes.posteriors.storage.formats.safetensors.load", None)
    with pytest.raises(ValueError, match=r"x: w: expected shape \[3\], got \[2\]"):
        decode_tensors(data, where="x", shapes={"w": (3,)})
    with pytest.raises(ValueError, match=r"x: missing tensors \['v'\], unknown tensors \['w'\]"):
        decode_tensors(data, where="x", shapes={"v": (2,)})
