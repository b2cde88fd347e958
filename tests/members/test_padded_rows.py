"""Rows that are padded on the left are read as they are alone, in predictions, training and curvature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    Gemma3Config,
    Gemma3ForSequenceClassification,
    GPT2ForSequenceClassification,
    LlamaForSequenceClassification,
    OPTConfig,
    OPTForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLNetConfig,
    XLNetForSequenceClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_bayes import BradleyTerry, attach
from hf_bayes.core.layout import select
from hf_bayes.members.padded_rows import PaddedRows
from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.objectives.curvature_pass import run_curvature_pass
from scripts.reproduce.small_models import attached
from tests import tiny_models as models
from tests.members.reference import scattered
from tests.members.subject_models import bert_tagger
from tests.tiny_models import tiny_bert, tiny_gpt2, tiny_llama, tiny_vit

DOUBLE = torch.float64
SIZES: dict[str, Any] = {
    "vocab_size": models.VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "num_labels": 3, "pad_token_id": 0,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
OPT: dict[str, Any] = {
    "vocab_size": models.VOCABULARY, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "num_labels": 3, "pad_token_id": 0, "dropout": 0.0,
    "word_embed_proj_dim": 16,
}  # fmt: skip


def built(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: models._build(make, 0, DOUBLE)  # type: ignore[arg-type]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: tiny_bert(dtype=DOUBLE),  # pools the first position
    "bert without a padding token": lambda: tiny_bert(dtype=DOUBLE, pad_token_id=None),
    "roberta": built(lambda: RobertaForSequenceClassification(RobertaConfig(**SIZES))),
    "deberta": built(lambda: DebertaV2ForSequenceClassification(
        DebertaV2Config(**SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"], pooler_dropout=0.0))),
    "gpt2": built(lambda: GPT2ForSequenceClassification(tiny_gpt2(num_labels=3).config)),
    "llama": built(lambda: LlamaForSequenceClassification(tiny_llama(num_labels=3).config)),
    "opt": built(lambda: OPTForSequenceClassification(OPTConfig(**OPT))),
    "xlnet": built(lambda: XLNetForSequenceClassification(XLNetConfig(
        vocab_size=models.VOCABULARY, d_model=16, n_layer=2, n_head=2, d_inner=24, num_labels=3, dropout=0.0,
        summary_last_dropout=0.0, pad_token_id=0))),
    "tagger": lambda: bert_tagger(DOUBLE),
}  # fmt: skip
TOLERANCE = {"llama": 1e-5}
"""Llama computes norms in float32; the others are float64 throughout."""

TEXTS = [[7, 9, 2], [5, 8, 11, 13, 4, 6, 2], [3, 12, 10, 9, 2]]


def padded(side: str, labels: bool = False, width: int = 7) -> dict[str, Tensor]:
    """Return the texts as a batch; with labels of tokens, -100 at the padding."""

    def filled(values: list[list[int]], filler: int) -> Tensor:
        rows = [[filler] * (width - len(row)) for row in values]
        return torch.tensor([pad + row if side == "left" else row + pad for pad, row in zip(rows, values, strict=True)])

    batch = {"input_ids": filled(TEXTS, 0), "attention_mask": filled([[1] * len(text) for text in TEXTS], 0)}
    return batch | ({"labels": filled([[token % 3 for token in text] for text in TEXTS], -100)} if labels else {})


def alone(row: int) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([TEXTS[row]]), "attention_mask": torch.ones(1, len(TEXTS[row]), dtype=torch.long)}


SUBSPACES = {"xlnet": "logits_proj|sequence_summary", "deberta": "last_layer"}
"""These models take a subspace of their own; all others take "last_block"."""


def bayesian_of(name: str) -> Any:
    model, subspace = MODELS[name](), SUBSPACES.get(name, "last_block")
    return attach(model, scattered(model, select(model, subspace), 3), subspace=subspace).eval()


@pytest.mark.parametrize("per_pass", [None, 1])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_padded_on_the_left_is_the_row_alone(name: str, per_pass: int | None) -> None:
    bayesian, batch = bayesian_of(name), padded("left")
    bayesian.members_per_pass = per_pass
    output = bayesian(**batch)
    for row, text in enumerate(TEXTS):
        single = bayesian(**alone(row))
        for part in ("logits", "epistemic"):
            found, expected = getattr(output, part)[row], getattr(single, part)[0]
            found = found[batch["attention_mask"][row].bool()] if name == "tagger" else found
            assert len(found) == len(text) if name == "tagger" else True
            assert (found - expected).abs().max() < TOLERANCE.get(name, 1e-9)


def test_transformers_itself_reads_such_rows_otherwise() -> None:
    """The broken twin: what is mended here."""
    model = MODELS["bert"]()
    with torch.no_grad():
        assert (model(**padded("left")).logits[0] - model(**alone(0)).logits[0]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["bert", "gpt2", "tagger"])
def test_rows_padded_on_the_right_go_to_the_model_unchanged(name: str) -> None:
    rows, batch = PaddedRows(MODELS[name]()), padded("right")
    found = rows.moved(batch)
    assert found.places is None
    assert all(torch.equal(found.inputs[key], value) for key, value in batch.items())
    assert rows.moved(alone(1) | {"attention_mask": None}).places is None  # type: ignore[arg-type]


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("name", ["bert", "gpt2", "tagger"])
def test_training_reads_such_rows_as_they_are_alone(name: str, folded: bool) -> None:
    bayesian = bayesian_of(name)
    found = []
    for side in ("left", "right"):
        batch = padded(side, labels=True)
        if name != "tagger":
            batch["labels"] = torch.tensor([0, 1, 2])
        if folded:
            batch = {key: torch.cat([value, value.flip(0), value]) for key, value in batch.items()}
        theta = bayesian.theta.detach().clone().requires_grad_()
        loss = bayesian.log_lik(theta, batch, folded=folded).loss
        found.append((loss.detach(), torch.autograd.grad(loss.sum(), theta)[0]))
    for left, right in zip(*found, strict=True):
        assert torch.allclose(left, right, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("structure", ["kronecker", "full"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "tagger"])
def test_curvature_counts_the_tokens_of_such_rows(name: str, structure: str) -> None:
    model, found = MODELS[name](), []
    with attach(model, subspace=r"classifier\.weight|score\.weight|1\.(output\.dense|mlp\.c_proj)\.weight") as bayesian:
        for side in ("left", "right"):
            batch = padded(side, labels=True)
            if name != "tagger":
                batch["labels"] = torch.tensor([0, 1, 2])
            spec = CurvatureSpec(structure=structure, estimator="ggn")
            theta = bayesian.theta[0].detach()
            found.append(run_curvature_pass(bayesian, theta, lambda rows, b=batch: [b], 3, spec))
    left, right = (each.curvature.dense() for each in found)
    assert torch.allclose(left, right, rtol=1e-8, atol=1e-8 * float(right.abs().max()))
    assert found[0].log_lik == pytest.approx(found[1].log_lik)


@pytest.mark.parametrize("predict", [lambda b: b.linearise("probit"), lambda b: b.single_pass(structure="low_rank")],
                         ids=["linearised", "single pass"])  # fmt: skip
@pytest.mark.parametrize("name", ["bert", "gpt2", "tagger"])
def test_gaussian_outputs_are_those_of_rows_alone(name: str, predict: Callable[[Any], Any]) -> None:
    with attached(MODELS[name](), "last_layer") as bayesian:
        predict(bayesian)
        batch = padded("left")
        output = bayesian(**batch)
        for row in range(3):
            single = bayesian(**alone(row))
            for part in ("logits", "total"):
                found = getattr(output, part)[row]
                found = found[batch["attention_mask"][row].bool()] if name == "tagger" else found
                assert (found - getattr(single, part)[0]).abs().max() < 1e-8


def test_texts_of_pairs_are_moved_one_by_one() -> None:
    model = tiny_bert(dtype=DOUBLE, num_labels=1)
    theta = scattered(model, select(model, "last_block"), 3)
    with attach(model, theta, subspace="last_block", likelihood=BradleyTerry()) as bayesian:
        left, right = (
            {name: torch.stack([value, value.flip(0)], 1) for name, value in padded(side).items()}
            for side in ("left", "right")
        )
        assert (bayesian(**left).logits - bayesian(**right).logits).abs().max() < 1e-9


def test_curvature_of_pairs_counts_the_tokens_of_both_texts() -> None:
    found = []
    with attach(tiny_bert(dtype=DOUBLE, num_labels=1), subspace=r"1\.output\.dense\.weight",
                likelihood=BradleyTerry()) as bayesian:  # fmt: skip
        for side in ("left", "right"):
            batch = {name: torch.stack([value, value.flip(0)], 1) for name, value in padded(side).items()}
            batch["labels"] = torch.tensor([0, 1, 1])
            spec, theta = CurvatureSpec(structure="kronecker", estimator="ggn"), bayesian.theta[0].detach()
            found.append(run_curvature_pass(bayesian, theta, lambda rows, b=batch: [b], 3, spec).curvature.dense())
    assert torch.allclose(*found, rtol=1e-8, atol=1e-8 * float(found[1].abs().max()))


def test_positions_of_the_caller_go_with_their_tokens() -> None:
    bayesian, batch = bayesian_of("gpt2"), padded("left")
    positions = 3 + (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    given = bayesian(**batch, position_ids=positions).logits
    for row in range(3):
        own = 3 + torch.arange(len(TEXTS[row]))[None]
        assert (given[row] - bayesian(**alone(row), position_ids=own).logits[0]).abs().max() < 1e-9
    assert (given - bayesian(**batch).logits).abs().max() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_padding_may_be_another_token_than_the_models(side: str) -> None:
    bayesian, batch = bayesian_of("gpt2"), padded(side)
    other = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 17)
    assert torch.equal(bayesian(**batch).logits, bayesian(**{**batch, "input_ids": other}).logits)


class LastPosition(LlamaForSequenceClassification):
    """A class of a user, whose head reads the last position."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> SequenceClassifierOutput:  # type: ignore[override]
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state[:, -1]
        return SequenceClassifierOutput(logits=self.score(hidden))


def test_a_class_of_a_users_own_reads_rows_as_they_are() -> None:
    model = LastPosition(tiny_llama(num_labels=3, pad_token_id=None).config).eval()
    with attach(model, scattered(model, select(model, "last_layer"), 3), subspace="last_layer") as bayesian:
        found = bayesian(**padded("left")).logits
        for row in range(3):  # rotary positions: only their distances matter, in float32
            assert (found[row] - bayesian(**alone(row)).logits[0]).abs().max() < 1e-4


def gemma3() -> nn.Module:
    sizes = {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 32}
    for unused in ("hidden_dropout_prob", "attention_probs_dropout_prob", "num_labels"):
        del sizes[unused]
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 8, "patch_size": 4}  # fmt: skip
    config = Gemma3Config(text_config=sizes, vision_config=vision, mm_tokens_per_image=4, num_labels=3,
                          image_token_id=60, boi_token_id=61, eoi_token_id=62)  # fmt: skip
    return Gemma3ForSequenceClassification(config).eval()


def test_the_padding_token_is_that_of_the_part_that_heads_ask() -> None:
    rows = PaddedRows(model := gemma3())
    model.config.pad_token_id, model.config.get_text_config().pad_token_id = 3, 5
    batch = padded("left")
    assert rows.moved(batch).inputs["input_ids"][0].tolist() == [*TEXTS[0], 5, 5, 5, 5]
    model.config.get_text_config().pad_token_id = None
    with pytest.raises(ValueError, match=r"set model\.config\.get_text_config\(\)\.pad_token_id = tokenizer"):
        rows.moved(batch)


def test_pixels_are_no_tokens() -> None:
    batch = {name: value[:, -3:] for name, value in padded("left", width=8).items()}
    batch["attention_mask"][0, 0] = 0
    pixels = torch.rand(3, 3, 4, 4)  # as many colours as tokens
    assert torch.equal(
        PaddedRows(MODELS["bert"]()).moved({**batch, "pixel_values": pixels}).inputs["pixel_values"], pixels
    )


def test_padding_that_is_moved_needs_positions_too() -> None:
    bayesian = bayesian_of("roberta")
    with pytest.raises(ValueError, match=r"has 70 tokens, 63 of them padding, more .* table of positions ends there"):
        bayesian(**padded("left", width=70))


def test_a_head_that_needs_a_padding_token_says_so() -> None:
    model = LlamaForSequenceClassification(tiny_llama(num_labels=3, pad_token_id=None).config).eval()
    with attach(model, scattered(model, select(model, "last_layer"), 3), subspace="last_layer") as bayesian:
        with pytest.raises(ValueError, match=r"got 3 x 1 rows .*set model.config.pad_token_id = tokenizer.pad_token"):
            bayesian(**alone(0))
        bayesian.members_per_pass = 1
        bayesian(**alone(0))  # transformers reads a single row at its last position
        with pytest.raises(ValueError, match="got a text that ends in padding"):
            bayesian(**{name: value[:1] for name, value in padded("right").items()})
        bayesian(**{name: value[:1] for name, value in padded("left").items()})  # its last position is no padding
        bayesian.config.pad_token_id = 0
        bayesian(**padded("right"))


def test_heads_that_need_a_padding_token_are_known() -> None:
    for name in ("gpt2", "llama", "opt"):
        assert PaddedRows(MODELS[name]()).reads_pad_token
    assert PaddedRows(gemma3()).reads_pad_token  # its own forward only calls another one
    for name in ("bert", "roberta", "xlnet", "tagger"):
        assert not PaddedRows(MODELS[name]()).reads_pad_token
    assert not PaddedRows(tiny_gpt2()).moves  # a language model pads its prompts on the left
    assert PaddedRows(tiny_vit()).moved({"pixel_values": torch.zeros(2, 3, 8, 8)}).places is None
