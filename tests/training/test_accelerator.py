from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn

from hf_bayes.training.accelerator import without_data_parallel


def test_no_model_is_wrapped_in_data_parallel() -> None:
    accelerator, seen = Accelerator(cpu=True), []

    def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        seen.append((model, device_placement, evaluation_mode))
        return model

    accelerator.prepare_model = prepare_model
    without_data_parallel(accelerator)
    model = nn.Linear(1, 1)
    assert accelerator.prepare_model(model, False) is model
    assert seen == [(model, False, True)]  # accelerate wraps no model that is prepared for evaluation
