"""Models that classify recordings."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AutoModelForAudioClassification

from hf_bayes.members.compat import transformers as compat
from hf_bayes.members.inputs import num_positions_of
from hf_bayes.models.classification import BayesianClassifier


class BayesianModelForAudioClassification(BayesianClassifier):
    """M classifiers of audio as one model of ``input_values`` [B, samples] or ``input_features`` (spectrograms)."""

    task = "audio_classification"
    auto_class = AutoModelForAudioClassification

    def num_positions(self, inputs: dict[str, Any]) -> int:
        """Return the number of frames that the transformer layers read; there are fewer frames than samples."""
        samples, values = num_positions_of(inputs), inputs.get("input_values")
        if not isinstance(values, Tensor) or values.ndim != 2:
            return samples
        frames = compat.num_frames(self.core, samples)
        return samples if frames is None else max(1, frames)
