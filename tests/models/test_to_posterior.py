from __future__ import annotations

from typing import Any

import torch

from hf_bayes import LaplaceConfig, MeanFieldConfig, SWAGConfig, attach
from hf_bayes.core.config import MethodConfig
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.to_posterior import to_posterior
from tests import tiny_models as models
from tests.models.linear_cases import lora_bert, tagger
from tests.tiny_models import with_lora


def test_only_laplace_with_few_outputs_predicts_linearised() -> None:
    def stored(model: BayesianModel, method: MethodConfig) -> str:
        gaussian = Gaussian.diagonal(model.theta.detach()[:1], torch.ones_like(model.theta[:1]))
        options: dict[str, Any] = {"subspace": "trainable", "num_data": 1.0, "data_unit": "token", "tokenizer": None}
        return to_posterior(model, gaussian, method, seed=0, diagnostics={}, **options).config.prediction

    with attach(lora_bert()) as bayesian:
        found = {config.name: stored(bayesian, config) for config in (LaplaceConfig(), MeanFieldConfig(), SWAGConfig())}
    assert found == {"laplace": "linearised", "mean_field": "members", "swag": "members"}
    with attach(with_lora(models.tiny_llama())) as words, attach(tagger(), subspace="all") as tags:
        assert [stored(words, LaplaceConfig()), stored(tags, LaplaceConfig())] == ["members", "members"]
