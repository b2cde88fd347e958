from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_bayes
from hf_bayes.models.attaching import attach
from tests.members.reference import mixture, separate_logits
from tests.models.trained import from_disk, run
from tests.tiny_models import images, tiny_vit, with_lora
from tests.training.test_evaluation import brute_force
from tests.training.trained import METRICS


def image_rows(count: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    pixels = images(count, seed)["pixel_values"].tolist()
    return [{"pixel_values": image, "label": row % 3} for row, image in enumerate(pixels)]


def test_passes_over_images_are_sized_by_patches() -> None:
    with attach(tiny_vit(), subspace="last_layer", num_members=2) as bayesian:
        assert bayesian.num_positions(images()) == bayesian.core.vit(**images()).last_hidden_state.shape[1] == 5


@pytest.mark.parametrize("subspace", ["trainable", "last_layer"])
def test_an_image_classifier_trains_evaluates_saves_and_loads(tmp_path: Path, subspace: str) -> None:
    base = from_disk(tiny_vit(), tmp_path / "base")
    adapted = with_lora(base) if subspace == "trainable" else base
    held_out = image_rows(seed=5)
    trainer = run(tmp_path, adapted, image_rows(), held_out, subspace=subspace)
    assert trainer.rows.num_data == 4
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model()
    loaded = hf_bayes.BayesianModelForImageClassification.from_pretrained(tmp_path / "posterior")
    theta, layout = trainer.posterior.sample(None), trainer.bayesian.layout
    logits = separate_logits(trainer.bayesian.detach(), layout, theta, images(4, seed=5))
    expected = brute_force(logits.double().log_softmax(-1), torch.arange(4) % 3)
    assert {name: found[f"eval_{name}"] for name in METRICS} == pytest.approx(expected, rel=2e-5, abs=2e-6)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**images(4, seed=5)).logits.double(), mixture(logits), rtol=0, atol=1e-5)
