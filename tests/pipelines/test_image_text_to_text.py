from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import ImageTextToTextPipeline, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.image_text import BayesianModelForImageTextToText
from hf_bayes.pipelines.factory import BayesianImageTextToTextPipeline, pipeline
from hf_bayes.posteriors.abstention import Abstention
from tests import multimodal, runs
from tests import tiny_models as models
from tests.illustrated import GREEDY, collate, rows_of
from tests.members.reference import core_of, showing
from tests.models.trained import from_disk
from tests.multimodal import IMAGE
from tests.tiny_models import tiny_tokenizer, with_lora


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


def test_keywords_that_nothing_reads_are_refused(posterior: Path) -> None:
    write = pipeline("bayesian-image-text-to-text", posterior)
    for name in ("do_sample", "num_beams", "max_new_token", "nonsense"):
        with pytest.raises(ValueError, match=rf"takes no {name}: give settings of generate in generate_kwargs="):
            write(images=PICTURE, text=f"{MARK} A chain", **{name: 1})
    with pytest.raises(ValueError, match="takes no nonsense"):
        pipeline("bayesian-image-text-to-text", posterior, nonsense=1)
    with pytest.raises(ValueError, match=r"Did you mean members= of hf_bayes\.pipeline"):
        write(images=PICTURE, text=f"{MARK} A chain", num_members=2)


def test_keywords_of_the_processor_are_taken(posterior: Path) -> None:
    write = pipeline("bayesian-image-text-to-text", posterior)
    given = {"padding": True, "do_rescale": True, "timeout": 3.0, "skip_special_tokens": False}
    (found,) = write(images=PICTURE, text=f"{MARK} A chain", generate_kwargs=GREEDY, **given)
    (plain,) = write(images=PICTURE, text=f"{MARK} A chain", generate_kwargs=GREEDY)
    assert found["tokens"] == plain["tokens"]
    parts = {"text_kwargs": {"padding": True}, "images_kwargs": {"do_rescale": True}, "return_mm_token_type_ids": False}
    assert (
        write(images=PICTURE, text=f"{MARK} A chain", generate_kwargs=GREEDY, **parts)[0]["tokens"] == plain["tokens"]
    )
    write.processor.chat_template = "{{ messages[0]['content'][0]['text'] }}{{ ending }}"
    chat = [{"role": "user", "content": [{"type": "text", "text": "A chain"}]}]
    assert write(text=chat, generate_kwargs=GREEDY, ending=" has")[0]["tokens"]


def test_uncertain_answers_are_withheld(posterior: Path) -> None:
    rule = Abstention(measure="total", threshold=1e-3, error_rate=0.1, failure_rate=0.1, num_rows=10, answered=0.5,
                      heldout_error_rate=0.05)  # fmt: skip
    given: dict[str, Any] = {"images": PICTURE, "text": f"{MARK} A chain", "generate_kwargs": GREEDY}
    write = pipeline("bayesian-image-text-to-text", posterior, abstain=rule)
    assert write(**given)[0]["abstained"] is True
    assert write(**given, abstain=replace(rule, threshold=99.0))[0]["abstained"] is False
    assert "abstained" not in write(**given, abstain=False)[0]


def test_another_tokenizer_inside_a_processor_is_refused(posterior: Path) -> None:
    other = processor()
    other.tokenizer = tiny_tokenizer(["entirely other words, many of them"])
    with pytest.raises(ValueError, match="is not the one the posterior was made with"):
        pipeline("bayesian-image-text-to-text", posterior, processor=other)
    with pytest.raises(ValueError, match="reads its inputs with processor=, got tokenizer="):
        pipeline("bayesian-image-text-to-text", posterior, models.tiny_tokenizer())
