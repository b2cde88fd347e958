"""Inputs that a model cannot answer are refused at its entrance, in words, and decoding pays nothing for it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, OPTConfig, OPTForCausalLM, RobertaConfig, RobertaForSequenceClassification

from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.input_check import InputCheck, check_vocabulary
from tests.tiny_models import VOCABULARY, batch, tiny_bert, tiny_gpt2, tiny_llama, tiny_tokenizer, tiny_vit, with_lora

IDS = batch(2, 6)["input_ids"]
CONTEXT = 128


def language_model() -> BayesianModel:
    return attach(tiny_gpt2(), subspace="last_block", num_members=2)


def rotary() -> BayesianModel:
    return attach(with_lora(tiny_llama()), num_members=2)


def classifier() -> BayesianModel:
    return attach(tiny_bert(), subspace="last_layer", num_members=2)


ENTRANCES: dict[str, tuple[Callable[[], BayesianModel], Callable[..., Any]]] = {
    "forward": (language_model, lambda model, **inputs: model(**inputs)),
    "generate": (language_model, lambda model, **inputs: model.generate(**inputs, max_new_tokens=2)),
    "score": (language_model, lambda model, **inputs: model.score(**inputs)),
    "evaluate": (language_model, lambda model, **inputs: model.evaluate_batch({**inputs, "labels": IDS})),
    "classify": (classifier, lambda model, **inputs: model(**inputs)),
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too large": ({"input_ids": torch.cat([IDS[:1], IDS[1:] * 0 + 320])}, "row 1 .* id 320, expected 0 to 319"),
    "negative": ({"input_ids": IDS.clone().fill_(-100)}, "token id -100, expected 0 to 319"),
    "floats": ({"input_ids": IDS.float()}, r"got torch\.float32: token ids are indices"),
    "no rows": ({"input_ids": IDS[:0]}, r"of each one or more, got the shape \[0, 6\]"),
    "a list": ({"input_ids": IDS.tolist()}, r"got list: give torch\.tensor"),
    "all padding": (
        {"input_ids": IDS, "attention_mask": torch.tensor([[1] * 6, [0] * 6])},
        "row 1 .* padding alone .* Leave the row out",
    ),
    "another mask": ({"input_ids": IDS, "attention_mask": torch.ones(2, 3)}, r"attention_mask"),
    "no place": ({"input_ids": IDS.repeat(1, 30)}, "180 .*more than the model's context of 128"),
}  # fmt: skip


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("bad", BAD)
def test_bad_inputs_are_refused_at_every_entrance(entrance: str, bad: str) -> None:
    make, call = ENTRANCES[entrance]
    inputs, message = BAD[bad]
    with pytest.raises(ValueError, match=message):
        call(make(), **inputs)


def test_one_row_without_its_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got the shape \[6\]: add the dimension of rows: input_ids\[None\]"):
        language_model()(IDS[0])
    with pytest.raises(ValueError, match=r"input_ids\[None\]"):
        language_model().generate(IDS[0], max_new_tokens=2)


def test_the_advice_for_a_text_too_long_works_as_printed() -> None:
    model, tokenizer = language_model(), tiny_tokenizer()
    text, tokenizer.model_max_length = "my lord " * 300, 10**6
    with pytest.raises(ValueError, match=r"^the text has \d+ tokens, .*: cut the text") as caught:
        model(**tokenizer(text, truncation=True, return_tensors="pt"))
    (length,) = re.findall(r"truncation=True, max_length=(\d+)", str(caught.value))
    assert length == str(CONTEXT)
    model(**tokenizer(text, truncation=True, max_length=int(length), return_tensors="pt"))


def test_a_row_is_numbered_only_beside_others() -> None:
    model = language_model()
    for number, name in ((1, "the text"), (2, "row 0 of the batch")):
        for inputs in ({"input_ids": IDS[:number] + 320}, {"input_ids": IDS[:number].repeat(1, 30)}):
            with pytest.raises(ValueError, match=f"^{name} has "):
                model(**inputs)
    with pytest.raises(ValueError, match=r"^row 7 of the rows has "):
        model.check_inputs({"input_ids": IDS[:1] + 320}, where="the rows", first=7)


def test_the_row_with_most_tokens_is_the_one_too_long() -> None:
    ids = torch.full((3, CONTEXT + 2), 5)
    mask = (torch.arange(CONTEXT + 2) < torch.tensor([[4], [5], [CONTEXT + 2]])).long()
    with pytest.raises(ValueError, match=rf"^row 2 of the batch has {CONTEXT + 2} tokens"):
        language_model()(ids, attention_mask=mask)
    mask[2, CONTEXT:] = 0  # padding alone is past the table
    with pytest.raises(ValueError, match=rf"^row 2 of the batch has {CONTEXT + 2} tokens"):
        language_model()(ids, attention_mask=mask)


def test_a_prompt_without_room_is_to_be_shortened() -> None:
    for times in (22, 30):  # 132 and 180 tokens
        with pytest.raises(ValueError, match=r"more than the model's context .*: shorten the prompt to leave room"):
            language_model().generate(IDS[:1].repeat(1, times), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"128 tokens and 2 new ones .*: shorten the prompt to leave room"):
        language_model().generate(IDS[:1].repeat(1, 22)[:, :CONTEXT], max_new_tokens=2)


def test_decoded_tokens_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looked = language_model(), []
    look = Tensor.aminmax
    monkeypatch.setattr(Tensor, "aminmax", lambda self: looked.append(self.shape) or look(self))
    model.generate(IDS, max_new_tokens=5, do_sample=False)
    assert looked == [IDS.shape]
    looked.clear()
    cache = model(IDS, past_key_values=DynamicCache(config=model.config)).past_key_values
    model(IDS[:, :1], past_key_values=cache)
    assert looked == []


def test_a_prompt_and_its_new_tokens_must_fit_the_table() -> None:
    model, prompt = language_model(), IDS[:1].repeat(1, 20)
    assert model.generate(prompt, max_new_tokens=8, min_new_tokens=8).shape[1] == CONTEXT
    with pytest.raises(
        ValueError, match=r"prompt of 120 tokens and 9 new ones are more .* max_new_tokens to 8 or less"
    ):
        model.generate(prompt, max_new_tokens=9)
    padded = torch.cat([torch.zeros(1, 10, dtype=torch.long), prompt], 1)
    mask = (torch.arange(130) >= 10).long()[None]
    model.generate(padded, attention_mask=mask, max_new_tokens=3)  # padding on the left has no positions
    model.score(padded, mask)


def test_a_rotary_model_warns_once_past_its_context() -> None:
    model, long = rotary(), IDS.repeat(1, 30)
    with pytest.warns(UserWarning, match=r"has 180 tokens, more than .* context of 128 .*not trained on"):
        model.score(long)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(long)
    with pytest.warns(UserWarning, match="120 tokens and 20 new ones"):
        rotary().generate(IDS[:1].repeat(1, 20), max_new_tokens=20)


@pytest.mark.filterwarnings("error::UserWarning")
def test_packed_rows_are_as_long_as_their_positions() -> None:
    positions = torch.arange(60).repeat(2, 3)
    rotary()(IDS.repeat(1, 30), position_ids=positions)


@pytest.mark.parametrize(
    ("make", "longest"),
    [
        (lambda: OPTForCausalLM(OPTConfig(**SMALL, word_embed_proj_dim=16, ffn_dim=16)), 64),
        (lambda: RobertaForSequenceClassification(RobertaConfig(**SMALL, intermediate_size=16)), 62),
    ],
    ids=["opt", "roberta"],
)
def test_tables_of_positions_are_as_long_as_they_serve(make: Callable[[], Any], longest: int) -> None:
    model = make().eval()
    check = InputCheck(model)
    assert (check.longest, check.has_table) == (longest, True)
    ids = torch.full((1, longest), 5)
    model(ids)
    check({"input_ids": ids})
    with pytest.raises(ValueError, match=f"context of {longest} tokens"):
        check({"input_ids": torch.full((1, longest + 1), 5)})


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip


def test_images_and_embeddings_are_not_looked_at() -> None:
    InputCheck(tiny_vit())({"pixel_values": torch.zeros(0, 3, 8, 8)})
    model = rotary()
    model(inputs_embeds=model.get_input_embeddings()(IDS))


def test_a_tokenizer_larger_than_the_embedding_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    check_vocabulary(tokenizer, tiny_llama())
    tokenizer.add_tokens(["<a>", "<b>"])
    with pytest.raises(ValueError, match=r"ids up to 321, .* rows 0 to 319: .*resize_token_embeddings"):
        check_vocabulary(tokenizer, with_lora(tiny_llama(), target_modules=["embed_tokens"]).get_base_model())
