from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from hf_bayes.pipelines.records import TokenRecords
from tests import tiny_models as models


def pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int], **kwargs: Any) -> list[str]:
    records = TokenRecords(tokenizer, **kwargs)
    found = [record["token"] for token in ids for record in records.add(token, 0.0, 0.0, 0.0, 0.0)]
    return found + [record["token"] for record in records.close()]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Llama 2's decoder: spaces as a mark that is dropped at the beginning, bytes as tokens."""
    words = ["<pad>", "<s>", "</s>", "▁the", "▁", "cell", "▁cell", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def test_tokens_joined_are_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "Zwölf  naïve\n\tcafés: 你好 👩‍🔬 \u202e!"
    ids = tokenizer(text)["input_ids"]
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids)
    assert "".join(found) == text
    assert "好" in found
    assert "👩" in found
    assert found[ids.index(models.tiny_tokenizer()("\n")["input_ids"][0])].endswith("\n")
    for seed in range(20):  # bytes that are no text
        ids = torch.randint(3, models.VOCABULARY, (20,), generator=torch.Generator().manual_seed(seed)).tolist()
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_bytes_that_are_no_character_show_at_their_own_token(tokenizer: PreTrainedTokenizerFast) -> None:
    lone, letter = tokenizer.convert_tokens_to_ids(["å", "A"])  # byte E5 begins a character, 41 does not continue it
    assert pieces(tokenizer, [letter, lone, letter]) == ["A", "\ufffd", "A"]


def test_special_tokens_go_by_name(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("the cell")["input_ids"]
    assert pieces(tokenizer, [models.BOS, *ids, models.EOS])[:: len(ids) + 1] == ["<s>", "</s>"]
    assert "".join(pieces(tokenizer, [models.BOS, *ids, models.EOS])[1:-1]) == "the cell"


def test_tokens_of_a_sentencepiece_decoder_keep_their_spaces() -> None:
    tokenizer = sentencepiece_like()
    byte = tokenizer.convert_tokens_to_ids
    ids = byte(["▁the", "▁cell", "cell", "▁", "▁", "<0xE4>", "<0xBD>", "<0xA0>", "<0x0A>", "▁the"])
    assert pieces(tokenizer, ids) == ["the", " cell", "cell", " ", " ", "", "", "你", "\n", " the"]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
    assert pieces(tokenizer, ids[1:3], context=ids[:1]) == [" cell", "cell"]
