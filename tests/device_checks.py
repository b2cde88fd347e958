"""The models, runs and comparisons of the paths on an accelerator, and the register of these paths.

The accelerator is a GPU where torch sees one, and otherwise the pretend device.
"""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_bayes import attach
from hf_bayes.core.config import MethodConfig
from tests import runs
from tests import tiny_models as models

PATHS: dict[str, Callable[[Path], None]] = {}

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "privateuseone", 0)  # as the pretend device is called until it is loaded


def path(function: Callable[[Path], None]) -> Callable[[Path], None]:
    PATHS[function.__name__] = function
    return function


def path_of_each(*names: str) -> Callable[[Callable[[Path, str], None]], None]:
    def register(function: Callable[[Path, str], None]) -> None:
        PATHS.update({f"{function.__name__}[{name}]": partial(function, name=name) for name in names})

    return register


def there(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def members(model: Any, **options: Any) -> Any:
    """Three that disagree, on the CPU."""
    bayesian = attach(model, num_members=3, **options)
    with torch.no_grad():
        bayesian.theta.add_(0.3 * torch.randn(bayesian.theta.shape, generator=torch.Generator().manual_seed(1)))
    return bayesian.eval()


def from_disk(folder: Path, make: Callable[[], PreTrainedModel] = models.tiny_llama) -> PreTrainedModel:
    """Return a model on the CPU that has a folder, so that a posterior on it finds its base again."""
    model = make()
    if not (folder / "base").exists():
        model.save_pretrained(folder / "base")
    return type(model).from_pretrained(folder / "base")


def trainer(folder: Path, method: MethodConfig, **changes: Any) -> Any:
    return runs.trainer(folder, method, **{"use_cpu": False, "dataloader_pin_memory": True, **changes})


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Check that a tensor on the device equals the result of the CPU."""
    assert found.device == DEVICE, found.device
    # sums of float32 in another order: a GPU's, or the CPU's own on rows that the package divides otherwise
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def waits_of(work: Callable[[], Any]) -> int:
    """Return how often the work waits for the device."""
    with unittest.mock.patch.object(torch.accelerator, "synchronize", wraps=torch.accelerator.synchronize) as waited:
        work()
    return waited.call_count


def random_state() -> list[int]:
    """Return the state of the device's own generator; of the pretend device, the seeds that it was given."""
    return torch.cuda.get_rng_state().tolist() if IS_GPU else list(torch.pretend.seeds)
