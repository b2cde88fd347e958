"""Pipelines of text that several files test."""

from __future__ import annotations

from typing import Any

import pytest

from hf_bayes.pipelines.factory import BayesianTextGenerationPipeline, pipeline
from tests import tiny_models as models
from tests.pipelines.built import TEMPLATE, bayesian


@pytest.fixture(scope="module")
def generate() -> BayesianTextGenerationPipeline:
    tokenizer = models.tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return pipeline("bayesian-text-generation", bayesian(), tokenizer)


@pytest.fixture(scope="module")
def classify() -> Any:
    return pipeline("bayesian-text-classification", bayesian("bert"), models.tiny_tokenizer())
