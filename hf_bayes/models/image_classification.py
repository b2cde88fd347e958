"""Models that classify images."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForImageClassification

from hf_bayes.members.inputs import num_positions_of
from hf_bayes.models.classification import BayesianClassifier


class BayesianModelForImageClassification(BayesianClassifier):
    """M classifiers of images as one model of ``pixel_values`` [B, channels, height, width]."""

    task = "image_classification"
    linearises = True
    auto_class = AutoModelForImageClassification

    def num_positions(self, inputs: dict[str, Any]) -> int:
        """Return the number of patches that ViT makes of an image; the second dimension would be its channels."""
        pixels, patch = inputs.get("pixel_values"), getattr(self.config, "patch_size", 16)
        if pixels is None or not isinstance(patch, int):
            return num_positions_of(inputs)
        return 1 + int(pixels.shape[-2] * pixels.shape[-1]) // patch**2
