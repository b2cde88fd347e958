from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from hf_bayes.models.language.token_uncertainty import TokenRecord
from hf_bayes.pipelines.records import TokenRecords, UncertaintyStreamer, decision
from hf_bayes.posteriors.abstention import Abstention
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


def test_a_character_that_begins_in_the_context_is_shown(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("日本語")["input_ids"]
    for start in (1, 2, 4):
        assert "".join(pieces(tokenizer, ids[start:], context=ids[:start])) == "日本語"[start // 3 :]
    byte = sentencepiece_like().convert_tokens_to_ids
    ids = byte(["<0xE4>", "<0xBD>", "<0xA0>", "▁the"])
    assert pieces(sentencepiece_like(), ids[1:], context=ids[:1]) == ["", "你", " the"]


def test_bytes_of_the_context_that_are_no_character_are_not(tokenizer: PreTrainedTokenizerFast) -> None:
    lone, letter = tokenizer.convert_tokens_to_ids(["å", "A"])
    assert pieces(tokenizer, [letter, letter], context=[lone]) == ["A", "A"]


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


def test_a_stream_of_several_rows_is_refused_with_advice(tokenizer: PreTrainedTokenizerFast) -> None:
    numbers = TokenRecord(*torch.zeros(5, 2))
    with pytest.raises(ValueError, match=r"got 2 at once: give one prompt at a time \(batch_size=1\)"):
        UncertaintyStreamer(tokenizer, print).on_step(torch.tensor([3, 4]), numbers)


def test_a_rule_decides_by_its_measure() -> None:
    rule = Abstention(measure="largest_epistemic", threshold=0.2, error_rate=0.1, failure_rate=0.1, num_rows=10,
                      answered=0.5, heldout_error_rate=0.05)  # fmt: skip
    means = {"total": 0.5, "aleatoric": 0.3, "epistemic": 0.2, "sequence_logprob": -1.0}
    record = {"tokens": [{"epistemic": 0.1}, {"epistemic": 0.3}], "uncertainty": means}
    assert decision(record, rule) == {"abstained": True}
    assert decision(record, None) == {}
