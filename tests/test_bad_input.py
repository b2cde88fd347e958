"""Common mistakes, row by row: refused before the first step, in words, with nothing half-written left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs
from tests.bad_input.making import (
    Refused,
)
from tests.bad_input.method_and_data import METHOD_AND_DATA
from tests.bad_input.model_and_labels import MODEL_AND_LABELS
from tests.bad_input.trainer_settings import TRAINER_SETTINGS
from tests.tiny_models import (
    tiny_llama,
    with_lora,
)

REFUSED = [*METHOD_AND_DATA, *MODEL_AND_LABELS, *TRAINER_SETTINGS]


def rows_of_the_campaign(case: Refused) -> Any:
    return pytest.param(case, marks=pytest.mark.reliability("F12") if case.topic == "target" else ())


@pytest.mark.parametrize("case", [*map(rows_of_the_campaign, REFUSED)], ids=lambda case: f"{case.topic}-{case.what}")
def test_a_mistake_is_refused_before_the_first_step(tmp_path, monkeypatch, case):
    stepped = []
    step = BayesianTrainer.training_step
    monkeypatch.setattr(BayesianTrainer, "training_step", lambda *a, **k: stepped.append(1) or step(*a, **k))
    out = tmp_path / "out"
    with pytest.raises(case.error) as caught:
        case.act(out)
    message = str(caught.value)
    assert [word for word in case.words if word not in message] == [], message
    assert "\n" not in message.strip() or case.topic in ("adapter", "padding")  # peft's and transformers' own words
    if case.topic != "not finite":
        assert not stepped
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_model_whose_trainer_was_refused_is_as_it_was(tmp_path):
    model = with_lora(tiny_llama())
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    x = torch.arange(4, 12)[None]
    before = model(input_ids=x).logits
    for mistake in (
        {"train": Dataset.from_list([])},
        {"subspace": "lora_B"},
        {"train": [{"input_ids": [5, 6, 7]}] * 4},
    ):
        with pytest.raises(ValueError):
            runs.trainer(tmp_path, SGHMCConfig(), model=model, **mistake)
        assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trainable
        assert torch.equal(model(input_ids=x).logits, before)
    runs.trainer(tmp_path, SGHMCConfig(num_chains=2), model=model).train()
