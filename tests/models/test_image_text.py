"""Models that write text about images: from a trainer to a directory and back, against separate models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_bayes
from hf_bayes.core.layout import decoder_blocks, select
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.attaching import attach
from tests import multimodal, runs
from tests.illustrated import GREEDY, MAKE, bayesian, collate, rows_of
from tests.members.reference import entropies, mixture, scattered, separate_logits
from tests.models.trained import from_disk
from tests.multimodal import IMAGE, illustrated
from tests.tiny_models import with_lora


def separately(kind: str, inputs: dict[str, Tensor], num_members: int = 3) -> Tensor:
    model = MAKE[kind](torch.float64)
    layout = select(model, "last_block")
    return separate_logits(model, layout, scattered(model, layout, num_members), inputs)


# -- generate and score ----------------------------------------------------------------------------------------------


def test_blocks_are_those_of_the_part_that_writes() -> None:
    name, blocks = decoder_blocks(multimodal.llava()) or ("", ())
    assert (name, len(blocks)) == ("model.language_model.layers", 2)
    assert select(multimodal.llava(), "last_block").names[0].startswith("model.language_model.layers.1.")


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beams"])
def test_generated_tokens_are_judged_as_by_separate_models(kind: str, options: dict[str, Any]) -> None:
    inputs = illustrated(kind, padding="left", dtype=torch.float64)
    model = bayesian(kind)
    output = model.generate(**inputs, **GREEDY, **options, return_dict_in_generate=True)
    times, length = len(output.sequences) // 3, inputs["input_ids"].shape[1]
    for number, sequence in enumerate(output.sequences):
        row = model.take_rows(inputs, torch.tensor([number // times]))
        count = int(output.logprobs[number].isfinite().sum())
        start = int(row["attention_mask"].argmax())
        row["input_ids"] = sequence[None, start : length + count]
        for name in {"token_type_ids", "mm_token_type_ids"} & set(row):
            row[name] = (row["input_ids"] == IMAGE).long()
        logits = separately(kind, {k: v for k, v in row.items() if k != "attention_mask"})[:, 0]
        logits = logits[:, length - start - 1 : -1]
        expected = mixture(logits).gather(-1, sequence[length : length + count, None])[:, 0]
        # positions are counted from padding here and not there, and rotated in float32
        torch.testing.assert_close(output.logprobs[number, :count], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(output.epistemic[number, :count], entropies(logits)[2], rtol=0, atol=1e-5)


def test_the_image_matters_and_scores_are_those_of_generation() -> None:
    model, inputs = bayesian("llava"), illustrated("llava", dtype=torch.float64)
    output = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    pixels = {"pixel_values": inputs["pixel_values"]}
    scores = model.score(output.sequences, first=9, **pixels)
    torch.testing.assert_close(scores.total, output.total, rtol=0, atol=1e-6)
    torch.testing.assert_close(scores.sequence_logprob, output.sequence_logprob, rtol=0, atol=1e-6)
    others = model.score(output.sequences, first=9, pixel_values=inputs["pixel_values"].flip(0))
    assert (others.total - scores.total).abs().max() > 1e-3


def test_slices_of_rows_take_their_images_along(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = bayesian("qwen2_vl"), illustrated("qwen2_vl", dtype=torch.float64)
    whole = model.score(**inputs)
    monkeypatch.setattr("hf_bayes.models.language.causal_members.HIDDEN_BYTES", 0)
    monkeypatch.setattr(model.predictor, "tensors_per_state", 10**9, raising=False)
    assert len(list(model.row_slices(inputs))) == 3
    torch.testing.assert_close(model.score(**inputs), whole, rtol=0, atol=1e-10)


# -- which images belong to which row --------------------------------------------------------------------------------


def test_the_first_image_of_another_row_is_caught() -> None:
    inputs = illustrated("qwen2_vl", dtype=torch.float64)
    model = bayesian("qwen2_vl")
    taken = model.take_rows(inputs, torch.tensor([2]))
    assert torch.equal(taken["pixel_values"], inputs["pixel_values"][8:])
    wrong = {**taken, "pixel_values": inputs["pixel_values"][:4]}
    with torch.no_grad():
        right = model(**inputs).logits[2]
        assert (model(**taken).logits[0] - right).abs().max() < 1e-6 < (model(**wrong).logits[0] - right).abs().max()


# -- refusals --------------------------------------------------------------------------------------------------------


def paligemma() -> nn.Module:
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**multimodal.VISION, projection_dim=16), projection_dim=16,
        text_config=transformers.GemmaConfig(**multimodal.TEXT, head_dim=8), image_token_id=IMAGE,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration(config)


def git() -> nn.Module:
    fields = {k: v for k, v in multimodal.TEXT.items() if k != "num_key_value_heads"}
    return transformers.GitForCausalLM(transformers.GitConfig(vision_config=dict(multimodal.VISION), **fields))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (paligemma, "PaliGemmaFor.* lets the tokens of a prompt see later ones"),
        (git, "GitForCausalLM has no placeholder token for images"),
    ],
)
def test_models_of_other_kinds_are_refused_when_attached(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=rf"{message}.* such as Llava"):
        attach(model, subspace="last_layer")
    assert not any("forward" in vars(module) for module in model.modules())


def test_inputs_of_other_kinds_are_refused() -> None:
    inputs = illustrated("llava", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"inputs pixel_values_videos: .* Give images and text only"):
        bayesian("llava")(**inputs, pixel_values_videos=torch.zeros(3, 1, 3, 8, 8))


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
@pytest.mark.parametrize("minibatch", ["independent", "shared"])
def test_it_is_trained_evaluated_saved_and_loaded(kind: str, minibatch: str, tmp_path: Path) -> None:
    base = from_disk(MAKE[kind](), tmp_path / "base")
    trainer = runs.trainer(
        tmp_path / "posterior", SGHMCConfig(num_chains=2, draws_per_chain=2), model=with_lora(base),
        train=rows_of(kind), eval_dataset=rows_of(kind, seed=5), collator=collate, minibatch=minibatch,
        members_per_pass=1, max_steps=4,
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    inputs = illustrated(kind, 4, seed=5)
    layout, theta = trainer.bayesian.layout, trainer.posterior.sample(None)
    log_probs = mixture(separate_logits(trainer.bayesian.detach(), layout, theta, inputs))[:, :-1]
    labels = collate(rows_of(kind, seed=5))["labels"][:, 1:]
    nll = nn.functional.nll_loss(log_probs.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert metrics["eval_nll"] == pytest.approx(nll.item(), rel=2e-5)

    loaded = hf_bayes.BayesianModelForImageTextToText.from_pretrained(tmp_path / "posterior")
    assert loaded.posterior.config.task == "image_text_to_text"
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits[:, :-1].double(), log_probs, rtol=0, atol=1e-5)


# -- pipeline --------------------------------------------------------------------------------------------------------
