"""The pipeline of images, against the members' own logits and against transformers' pipeline of one member."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from PIL import Image
from torch import Tensor, nn
from transformers import BaseImageProcessor, ImageClassificationPipeline, ViTImageProcessor
from transformers.pipelines.pt_utils import KeyDataset

from hf_bayes.core.layout import select
from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from hf_bayes.pipelines.factory import BayesianImageClassificationPipeline, pipeline
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.sidecars import Sidecars
from hf_bayes.uncertainty.several_labels import decompose_labels
from tests import tiny_models as models
from tests.members.reference import entropies, mixture, scattered, separate_logits, showing
from tests.models.test_image_classification import image_rows
from tests.models.trained import from_disk, run
from tests.pipelines.built import PARTS, approximately
from tests.tiny_models import tiny_vit, with_lora

LABELS = {0: "cat", 1: "dog", 2: "cow"}


def picture(seed: int, size: tuple[int, int] = (10, 12)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


PICTURES = [picture(seed, (6 + seed, 9)) for seed in range(5)]


def processor(mean: float = 0.5) -> BaseImageProcessor:
    return ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[mean] * 3, image_std=[0.25] * 3)


def labelled_vit(**config: Any) -> nn.Module:
    return tiny_vit(id2label=LABELS, label2id={name: index for index, name in LABELS.items()}, **config)


def bayesian(num_members: int = 3, noise_std: float | None = None, **config: Any) -> BayesianModel:
    model = labelled_vit(**config)
    theta = scattered(model, select(model, "last_block"), num_members)
    return attach(model, theta, subspace="last_block", noise_std=noise_std).eval()


def member_logits(image: Image.Image) -> Tensor:
    """[M, 1, C] of the members of ``bayesian``, each run by itself."""
    model = labelled_vit()
    layout = select(model, "last_block")
    return separate_logits(model, layout, scattered(model, layout), dict(processor()(image, return_tensors="pt")))


@pytest.fixture(scope="module")
def classify() -> BayesianImageClassificationPipeline:
    return pipeline("bayesian-image-classification", bayesian(), image_processor=processor())


def test_images_have_the_mixtures_probabilities_and_entropies(classify: BayesianImageClassificationPipeline) -> None:
    for image in PICTURES:
        records = classify(image)
        logits = member_logits(image)
        probabilities = mixture(logits)[0].exp()
        # float32 forwards of folded rows against separate ones
        expected = {name: pytest.approx(probabilities[index].item(), abs=1e-5) for index, name in LABELS.items()}
        assert {record["label"]: record["score"] for record in records} == expected
        assert sorted(records, key=lambda record: -record["score"]) == records
        of_mean_logits = logits.double().mean(0)[0].softmax(-1)
        assert not torch.allclose(of_mean_logits, probabilities, atol=1e-3)  # the test would see it
        parts = dict(zip(PARTS, entropies(logits), strict=True))
        for record in records:
            assert record["uncertainty"] == {part: pytest.approx(parts[part].item(), abs=1e-5) for part in PARTS}
        assert json.loads(json.dumps(records, allow_nan=False)) == records


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_k": 9}, {"function_to_apply": "softmax"}], ids=str)
def test_one_member_gives_the_records_of_transformers(options: dict[str, Any]) -> None:
    model = labelled_vit()
    layout = select(model, "last_block")
    stock = ImageClassificationPipeline(model=model, image_processor=processor())
    single = pipeline("bayesian-image-classification", bayesian(1), image_processor=processor())
    for image in PICTURES:
        found = single(image, **options)
        assert {record.pop("uncertainty")["epistemic"] for record in found} == {0.0}
        with showing(model, layout, scattered(model, layout, 1)[0]):
            expected = stock(image, **options)
        # 1e-6: the softmax of log-probabilities against that of logits
        assert found == [{**record, "score": pytest.approx(record["score"], abs=1e-6)} for record in expected]


def test_all_kinds_of_input_equal_single_images(classify: BayesianImageClassificationPipeline, tmp_path: Path) -> None:
    expected = approximately([classify(image) for image in PICTURES])
    assert classify(PICTURES, batch_size=3) == expected
    assert classify(PICTURES[::-1], batch_size=3) != expected
    paths = [str(tmp_path / f"{index}.png") for index in range(len(PICTURES))]
    for image, path in zip(PICTURES, paths, strict=True):
        image.save(path)
    assert classify(paths, batch_size=2) == expected
    assert classify([np.array(image) for image in PICTURES], batch_size=2) == expected
    assert list(classify(KeyDataset(Dataset.from_dict({"image": paths}), "image"), batch_size=4)) == expected
    taken = []

    def endless() -> Iterator[Image.Image]:
        for image in itertools.cycle(PICTURES):
            taken.append(image)
            yield image

    assert [next(iter(classify(endless())))] == expected[:1]
    assert len(taken) < 4


def test_the_logarithms_of_the_mixture_can_be_had(classify: BayesianImageClassificationPipeline) -> None:
    scores = {record["label"]: record["score"] for record in classify(PICTURES[0], function_to_apply="none")}
    expected = mixture(member_logits(PICTURES[0]))[0].tolist()
    assert scores == {name: pytest.approx(expected[index], abs=1e-5) for index, name in LABELS.items()}
    ours = pipeline(
        "bayesian-image-classification", classify.model, image_processor=processor(), function_to_apply="NONE", top_k=1
    )
    assert ours(PICTURES[0]) == classify(PICTURES[0], function_to_apply="none", top_k=1)


@pytest.mark.parametrize("configured", [True, False])
def test_each_output_of_an_image_regression_has_own_deviations(configured: bool) -> None:
    model = bayesian(noise_std=0.5, problem_type="regression")
    if not configured:
        model.config.problem_type = None  # transformers would take the numbers for logits then
    records = pipeline("bayesian-image-classification", model, image_processor=processor())(PICTURES[0])
    logits = member_logits(PICTURES[0])[:, 0].double()
    for index, name in LABELS.items():
        record = next(record for record in records if record["label"] == name)
        deviation = logits[:, index].std(correction=0).item()
        assert record["score"] == pytest.approx(logits[:, index].mean().item(), abs=1e-5)
        uncertainty = {"predictive_std": (deviation**2 + 0.25) ** 0.5, "epistemic_std": deviation}
        assert record["uncertainty"] == pytest.approx(uncertainty, abs=1e-5)


def test_several_labels_have_the_uncertainty_of_the_input() -> None:
    model = bayesian(problem_type="multi_label_classification")
    records = pipeline("bayesian-image-classification", model, image_processor=processor())(PICTURES[0])
    logits = member_logits(PICTURES[0])[:, 0].double()
    expected = logits.sigmoid().mean(0).tolist()
    assert {record["label"]: record["score"] for record in records} == {
        name: pytest.approx(expected[index], abs=1e-5) for index, name in LABELS.items()
    }
    uncertainty = {name: float(value) for name, value in decompose_labels(logits)._asdict().items()}
    for record in records:
        assert record["uncertainty"] == pytest.approx(uncertainty, abs=1e-5)


@pytest.mark.parametrize(
    ("head", "options", "message"),
    [
        ({}, {"function_to_apply": "sigmoid"}, "'sigmoid' has no meaning for a Categorical .* 'softmax' or 'none'"),
        ({}, {"function_to_apply": "default"}, "'default' has no meaning .* Leave it out for 'softmax'"),
        ({"problem_type": "multi_label_classification"}, {"function_to_apply": "softmax"}, "Bernoulli likelihood"),
        ({"problem_type": "regression", "noise_std": 1.0}, {"function_to_apply": "sigmoid"}, "Normal .*: expected 'n"),
        ({}, {"top_k": 0}, "top_k is how many labels are returned, got 0"),
        ({}, {"top_k": -1}, "top_k is how many labels are returned, got -1"),
    ],
)
def test_arguments_without_a_meaning_are_refused(head: dict[str, Any], options: dict[str, Any], message: str) -> None:
    images = pipeline("bayesian-image-classification", bayesian(**head), image_processor=processor())
    with pytest.raises(ValueError, match=message):
        images(PICTURES[0], **options)
    with pytest.raises(ValueError, match=message):
        pipeline("bayesian-image-classification", images.model, image_processor=processor(), **options)


def test_no_images_at_all_are_refused(classify: BayesianImageClassificationPipeline) -> None:
    with pytest.raises(ValueError, match="got an empty list: give one input or more"):
        classify([])


def test_transformers_own_factory_knows_images(classify: BayesianImageClassificationPipeline) -> None:
    stock = transformers.pipeline(
        "bayesian-image-classification", model=classify.model, image_processor=classify.image_processor
    )
    assert stock(PICTURES[0]) == classify(PICTURES[0])
    with pytest.raises(ValueError, match="needs a BayesianModelForImageClassification, got ViTForImageClassification"):
        transformers.pipeline("bayesian-image-classification", model=tiny_vit(), image_processor=processor())


def test_the_image_processor_is_asked_for_and_nothing_else(classify: BayesianImageClassificationPipeline) -> None:
    with pytest.raises(ValueError, match="without its image processor: give image_processor="):
        pipeline("bayesian-image-classification", classify.model)
    with pytest.raises(ValueError, match="inputs with image_processor=, got tokenizer="):
        pipeline("bayesian-image-classification", classify.model, models.tiny_tokenizer())
    with pytest.raises(ValueError, match="inputs with tokenizer=, got image_processor="):
        pipeline("bayesian-text-classification", classify.model, image_processor=processor())


def mean_of(images: BayesianImageClassificationPipeline) -> float:
    (mean,) = set(images.image_processor.image_mean)
    return mean


def test_a_posterior_brings_its_image_processor_or_its_bases(tmp_path: Path) -> None:
    trainer = run(
        tmp_path, with_lora(from_disk(labelled_vit(), tmp_path / "base")), image_rows(), image_rows(seed=5),
        processing_class=processor(0.1),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    saved = tmp_path / "posterior"
    own = pipeline(model=saved)
    assert isinstance(own, BayesianImageClassificationPipeline)
    assert mean_of(own) == 0.1
    expected = pipeline("bayesian-image-classification", own.model, image_processor=processor(0.1))(PICTURES[0])
    assert own(PICTURES[0]) == expected
    assert {record["label"] for record in expected} == set(LABELS.values())

    processor(0.9).save_pretrained(tmp_path / "base")
    assert mean_of(pipeline(model=saved)) == 0.1
    replace(Posterior.from_pretrained(saved), sidecars=Sidecars()).save_pretrained(saved)
    assert mean_of(pipeline(model=saved)) == 0.9
    assert mean_of(pipeline(model=saved, image_processor=processor(0.3))) == 0.3
    assert mean_of(pipeline(model=saved, image_processor=tmp_path / "base")) == 0.9
    (tmp_path / "base").rename(tmp_path / "moved")
    assert mean_of(pipeline(model=saved, base_model=tmp_path / "moved")) == 0.9
    (tmp_path / "moved").rename(tmp_path / "base")
    (tmp_path / "base" / "preprocessor_config.json").unlink()
    with pytest.raises(OSError, match=r"beside the posterior .* give it as image_processor="):
        pipeline(model=saved)
