"""Models that write text about images: from a trainer to a directory and back, against separate models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers import ImageTextToTextPipeline, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import hf_bayes
from hf_bayes.core.layout import decoder_blocks, select
from hf_bayes.members.pictures import pictures_of, take_pictures
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.image_text import BayesianModelForImageTextToText
from hf_bayes.pipelines.factory import BayesianImageTextToTextPipeline, pipeline
from tests import multimodal, runs
from tests import tiny_models as models
from tests.members.reference import core_of, entropies, mixture, scattered, separate_logits, showing
from tests.models.test_classification import from_disk
from tests.multimodal import IMAGE, illustrated
from tests.tiny_models import tiny_tokenizer, with_lora

MAKE = {"llava": multimodal.llava, "gemma3": multimodal.gemma3, "qwen2_vl": multimodal.qwen2_vl}
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [IMAGE]}


def bayesian(kind: str, num_members: int = 3, subspace: str = "last_block") -> BayesianModel:
    model = MAKE[kind](torch.float64)
    theta = scattered(model, select(model, subspace), num_members)
    return attach(model, theta, subspace=subspace).eval()


def separately(kind: str, inputs: dict[str, Tensor], num_members: int = 3) -> Tensor:
    model = MAKE[kind](torch.float64)
    layout = select(model, "last_block")
    return separate_logits(model, layout, scattered(model, layout, num_members), inputs)


def rows_of(kind: str, count: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    batch = illustrated(kind, count, seed)
    rows = [{name: value[row] for name, value in batch.items() if len(value) == count} for row in range(count)]
    if kind == "qwen2_vl":
        rows = [{**row, "pixel_values": batch["pixel_values"][4 * i : 4 * i + 4]} for i, row in enumerate(rows)]
    return [{name: value.tolist() for name, value in row.items()} for row in rows]


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """As processors do it: the patches of all images one after the other."""
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    if "image_grid_thw" in batch:
        batch["pixel_values"] = batch["pixel_values"].flatten(0, 1)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, -100)}


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
    monkeypatch.setattr("hf_bayes.models.causal_members.HIDDEN_BYTES", 0)
    monkeypatch.setattr(model.predictor, "tensors_per_state", 10**9, raising=False)
    assert len(list(model.row_slices(inputs))) == 3
    torch.testing.assert_close(model.score(**inputs), whole, rtol=0, atol=1e-10)


# -- which images belong to which row --------------------------------------------------------------------------------


def test_images_follow_their_rows_by_placeholders() -> None:
    pixels = torch.arange(3.0).view(3, 1, 1, 1)
    found = take_pictures({"pixel_values": pixels}, torch.tensor([8, 0, 4]), torch.tensor([2, 0]))
    assert found["pixel_values"].flatten().tolist() == [2, 0, 1]
    grid = torch.tensor([[1, 2, 2], [1, 4, 2]])
    patches = {"pixel_values": torch.arange(12.0)[:, None], "image_grid_thw": grid}
    found = take_pictures(patches, torch.tensor([1, 2]), torch.tensor([1, 1, 0]))
    assert found["pixel_values"].flatten().tolist() == [*range(4, 12), *range(4, 12), *range(4)]
    assert found["image_grid_thw"].tolist() == [[1, 4, 2], [1, 4, 2], [1, 2, 2]]


@pytest.mark.parametrize("placeholders", [[5, 1, 0], [12, 0, 0]], ids=["uneven", "padded lists of images"])
def test_images_of_unknown_rows_are_refused(placeholders: list[int]) -> None:
    pixels = torch.zeros((3, 2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"3 rows has 3 images.* give each row one image"):
        take_pictures({"pixel_values": pixels}, torch.tensor(placeholders), torch.tensor([0]))


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


def processor() -> LlavaProcessor:
    images = CLIPImageProcessorPil(
        size={"height": 8, "width": 8}, crop_size={"height": 8, "width": 8}, do_center_crop=False
    )
    tokenizer = tiny_tokenizer(padding_side="left")
    settings = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, tokenizer, image_token=tokenizer.convert_ids_to_tokens(IMAGE), **settings)


PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (10, 12, 3), dtype=np.uint8))
MARK = tiny_tokenizer().convert_ids_to_tokens(IMAGE)


@pytest.fixture(scope="module")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A posterior with its processor; the base has none."""
    root = tmp_path_factory.mktemp("illustrated")
    base = from_disk(multimodal.llava(), root / "base")
    trainer = runs.trainer(root / "posterior", SGHMCConfig(num_chains=2), model=with_lora(base), train=rows_of("llava"),
                           collator=collate, processing_class=processor(), max_steps=2)  # fmt: skip
    trainer.train()
    trainer.save_model()
    return root / "posterior"


def test_a_directory_makes_a_pipeline_of_images_and_text(posterior: Path) -> None:
    write = pipeline(model=posterior)
    assert isinstance(write, BayesianImageTextToTextPipeline)
    (record,) = write(images=PICTURE, text=f"{MARK} A chain", generate_kwargs=GREEDY)
    model = BayesianModelForImageTextToText.from_pretrained(posterior)
    inputs = processor()(images=PICTURE, text=f"{MARK} A chain", return_tensors="pt")
    output = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert [token["id"] for token in record["tokens"]] == output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    assert [token["epistemic"] for token in record["tokens"]] == pytest.approx(output.epistemic[0].tolist(), abs=1e-6)
    assert record["uncertainty"]["sequence_logprob"] == pytest.approx(output.sequence_logprob.item(), abs=1e-6)
    words = "".join(token["token"] for token in record["tokens"])
    assert record["generated_text"] == f"{MARK} A chain{words}"


def test_one_member_gives_the_text_of_transformers(posterior: Path) -> None:
    single = pipeline("bayesian-image-text-to-text", posterior, members=1)
    model = single.model
    plain = with_lora(multimodal.llava())
    with showing(plain, model.layout, model.theta[0].detach()):
        stock = ImageTextToTextPipeline(model=core_of(plain), processor=processor())
        expected = stock(images=PICTURE, text=f"{MARK} A chain", generate_kwargs=GREEDY)
    (found,) = single(images=PICTURE, text=f"{MARK} A chain", generate_kwargs=GREEDY)
    assert {key: found[key] for key in expected[0]} == expected[0]
    assert all(abs(token["epistemic"]) < 1e-6 for token in found["tokens"])


def test_sequences_of_several_prompts_have_their_own_numbers(posterior: Path) -> None:
    write = pipeline("bayesian-image-text-to-text", posterior)
    texts = [f"{MARK} A chain", f"{MARK} Langevin dynamics"]
    several = {**GREEDY, "num_beams": 2, "num_return_sequences": 2}
    records = write(images=[PICTURE, PICTURE.rotate(90)], text=texts, generate_kwargs=several)
    assert [record["input_text"] for record in records] == [texts[0], texts[0], texts[1], texts[1]]
    for record in records:
        total = sum(token["logprob"] for token in record["tokens"])
        assert record["uncertainty"]["sequence_logprob_tokenwise"] == pytest.approx(total, abs=1e-5)


def test_another_tokenizer_inside_a_processor_is_refused(posterior: Path) -> None:
    other = processor()
    other.tokenizer = tiny_tokenizer(["entirely other words, many of them"])
    with pytest.raises(ValueError, match="is not the one the posterior was made with"):
        pipeline("bayesian-image-text-to-text", posterior, processor=other)
    with pytest.raises(ValueError, match="reads its inputs with processor=, got tokenizer="):
        pipeline("bayesian-image-text-to-text", posterior, models.tiny_tokenizer())


def test_pictures_are_found_by_name() -> None:
    assert set(pictures_of(illustrated("qwen2_vl"))) == {"pixel_values", "image_grid_thw"}
