"""Models that classify recordings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForAudioClassification

from hf_bayes.members.trunk import num_positions_of
from hf_bayes.models.classification import BayesianClassifier


class BayesianModelForAudioClassification(BayesianClassifier):
    """M classifiers of audio as one: ``input_values`` [B, samples] or ``input_features`` [B, ...] of spectrograms."""

    task = "audio_classification"
    auto_class = AutoModelForAudioClassification

    def num_positions(self, inputs: dict[str, Any]) -> int:
        """Frames that the transformer layers read, fewer than samples."""
        frames: Any = getattr(self.core, "_get_feat_extract_output_lengths", None)
        samples = num_positions_of(inputs)
        values = inputs.get("input_values")
        if frames is None or not isinstance(values, Tensor) or values.ndim != 2:
            return samples
        return max(1, int(frames(torch.tensor(samples))))
