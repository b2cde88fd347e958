"""Classifiers of audio: from a trainer to a directory and back, and their pipeline, against separate models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AudioClassificationPipeline, FeatureExtractionMixin, Wav2Vec2FeatureExtractor

import hf_bayes
from hf_bayes.core.layout import select
from hf_bayes.members.trunk import _has_dropout
from hf_bayes.models.attaching import attach
from hf_bayes.pipelines.factory import BayesianAudioClassificationPipeline, pipeline
from tests import multimodal
from tests.members.reference import entropies, mixture, scattered, separate_logits, showing
from tests.models.trained import from_disk, run
from tests.multimodal import sounds
from tests.tiny_models import with_lora
from tests.training.test_evaluation import brute_force
from tests.training.trained import METRICS

SOUND = np.random.default_rng(0).standard_normal(40).astype(np.float32)


def sound_rows(kind: str, count: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    values = sounds(kind, count, seed)["input_values"].tolist()
    return [{"input_values": value, "label": row % 3} for row, value in enumerate(values)]


def extractor(**settings: Any) -> FeatureExtractionMixin:
    return Wav2Vec2FeatureExtractor(do_normalize=False, **settings)


@pytest.mark.parametrize(("kind", "make"), [("wav2vec2", multimodal.wav2vec2), ("ast", multimodal.ast)])
def test_an_audio_classifier_is_trained_saved_and_loaded(kind: str, make: Any, tmp_path: Path) -> None:
    base = from_disk(make(), tmp_path / "base")
    trainer = run(tmp_path, with_lora(base), sound_rows(kind), sound_rows(kind, seed=5))
    assert trainer.rows.num_data == 4
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model()
    loaded = hf_bayes.BayesianModelForAudioClassification.from_pretrained(tmp_path / "posterior")
    assert loaded.posterior.config.task == "audio_classification"
    theta, layout = trainer.posterior.sample(None), trainer.bayesian.layout
    logits = separate_logits(trainer.bayesian.detach(), layout, theta, sounds(kind, 4, seed=5))
    expected = brute_force(logits.double().log_softmax(-1), torch.arange(4) % 3)
    assert {name: found[f"eval_{name}"] for name in METRICS} == pytest.approx(expected, rel=2e-5, abs=2e-6)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(**sounds(kind, 4, seed=5)).logits.double(), mixture(logits), rtol=0, atol=1e-5
        )


def test_passes_over_audio_are_sized_by_frames() -> None:
    with attach(multimodal.wav2vec2(), subspace="last_layer", num_members=2) as bayesian:
        inputs = sounds("wav2vec2")
        assert bayesian.num_positions(inputs) == bayesian.core.wav2vec2(**inputs).last_hidden_state.shape[1] == 9


def test_a_sum_over_all_layers_leaves_no_trunk() -> None:
    model = multimodal.wav2vec2(torch.float64, use_weighted_layer_sum=True)
    layout = select(model, "last_layer")
    theta, inputs = scattered(model, layout), sounds("wav2vec2", dtype=torch.float64)
    expected = mixture(separate_logits(model, layout, theta, inputs))
    with torch.no_grad(), attach(model, theta, subspace="last_layer") as bayesian:
        assert bayesian.members.num_trunk_blocks == 0
        torch.testing.assert_close(bayesian(**inputs).logits, expected, rtol=0, atol=1e-12)


def test_masks_on_audio_features_count_as_dropout() -> None:
    assert not _has_dropout(multimodal.wav2vec2())
    assert _has_dropout(multimodal.wav2vec2(mask_time_prob=0.1))
    assert not _has_dropout(multimodal.wav2vec2(mask_time_prob=0.1, apply_spec_augment=False))
    assert _has_dropout(multimodal.wav2vec2(layerdrop=0.1))


@pytest.fixture(scope="module")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("audio")
    names = {"id2label": {0: "yes", 1: "no", 2: "up"}, "label2id": {"yes": 0, "no": 1, "up": 2}}
    base = from_disk(multimodal.wav2vec2(**names), root / "base")
    trainer = run(root, with_lora(base), sound_rows("wav2vec2"), sound_rows("wav2vec2", seed=5),
                  processing_class=extractor(padding_value=0.5))  # fmt: skip
    trainer.train()
    trainer.save_model()
    return root / "posterior"


def test_a_directory_makes_a_pipeline_of_audio(posterior: Path) -> None:
    classify = pipeline(model=posterior)
    assert isinstance(classify, BayesianAudioClassificationPipeline)
    assert classify.feature_extractor.padding_value == 0.5
    records = classify(SOUND)
    model = hf_bayes.BayesianModelForAudioClassification.from_pretrained(posterior)
    plain = with_lora(multimodal.wav2vec2())
    logits = separate_logits(plain, model.layout, model.theta.detach(), {"input_values": torch.tensor(SOUND)[None]})
    probabilities, parts = mixture(logits)[0].exp(), [part.item() for part in entropies(logits)]
    for record in records:
        index = {"yes": 0, "no": 1, "up": 2}[record["label"]]
        assert record["score"] == pytest.approx(probabilities[index].item(), abs=1e-5)
        assert list(record["uncertainty"].values()) == pytest.approx(parts, abs=1e-5)
    assert len(records) == 3
    assert classify(SOUND, top_k=1) == records[:1]
    assert classify([{"raw": SOUND, "sampling_rate": 16_000}]) == [records]


def test_one_member_gives_the_records_of_transformers(posterior: Path) -> None:
    single = pipeline("bayesian-audio-classification", posterior, members=1)
    plain = with_lora(multimodal.wav2vec2(id2label=single.model.config.id2label))
    with showing(plain, single.model.layout, single.model.theta[0].detach()):
        expected = AudioClassificationPipeline(model=plain.get_base_model(), feature_extractor=extractor())(SOUND)
    found = single(SOUND)
    assert all(abs(record.pop("uncertainty")["epistemic"]) < 1e-6 for record in found)
    assert found == [{**record, "score": pytest.approx(record["score"], abs=1e-6)} for record in expected]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_recordings_of_any_length_are_read_as_they_are_alone(norm: str, has_mask: bool, side: str) -> None:
    noise = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    recordings = [noise[:length] for length in (60, 40, 100, 40, 81)]
    model = multimodal.wav2vec2(feat_extract_norm=norm)
    theta = scattered(model, select(model, "last_block"), 3)
    with attach(model, theta, subspace="last_block") as bayesian:
        reader = extractor(return_attention_mask=has_mask, padding_side=side)
        classify = pipeline(model=bayesian.eval(), feature_extractor=reader)
        alone = [classify(recording) for recording in recordings]
        scores = [record["score"] for records in alone for record in records]
        for found in (classify(recordings, batch_size=3), list(classify((one for one in recordings), batch_size=5))):
            assert [record["score"] for records in found for record in records] == pytest.approx(scores, abs=1e-6)
            for records, expected in zip(found, alone, strict=True):
                assert records[0]["uncertainty"] == pytest.approx(expected[0]["uncertainty"], abs=1e-6)


def test_a_feature_extractor_is_asked_for(posterior: Path) -> None:
    model = hf_bayes.BayesianModelForAudioClassification.from_pretrained(posterior)
    with pytest.raises(ValueError, match="without its feature extractor: give feature_extractor="):
        pipeline("bayesian-audio-classification", model)
    assert pipeline("bayesian-audio-classification", model, feature_extractor=extractor())(SOUND)
    assert pipeline(model=posterior, feature_extractor=posterior)(SOUND) == pipeline(model=posterior)(SOUND)
