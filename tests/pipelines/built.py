"""A Bayesian model for a pipeline, prompts, and a comparison of records."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from tests import tiny_models as models

PARTS = ("total", "aleatoric", "epistemic")


def bayesian(kind: str = "llama", **config: Any) -> BayesianModel:
    """Three members that disagree."""
    make = {**models.CAUSAL_LMS, "bert": models.tiny_bert}[kind]
    model = attach(models.with_lora(make(**config)), num_members=3)
    with torch.no_grad():
        model.theta.add_(0.3 * torch.randn(model.theta.shape, generator=torch.Generator().manual_seed(1)))
    return model.eval()


def approximately(record: Any) -> Any:
    """Equal to 1e-5 (to 1e-6 of sums over a sequence): sums over padded rows round otherwise in float32."""
    if isinstance(record, dict):
        return {key: approximately(value) for key, value in record.items()}
    if isinstance(record, list):
        return [approximately(value) for value in record]
    return pytest.approx(record, abs=1e-5, rel=1e-6) if isinstance(record, float) else record


PROMPTS = ["A chain that has not", "Langevin", "Uncertainty is total, aleatoric"]

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}"
    "{% if not loop.last or not continue_final_message %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
