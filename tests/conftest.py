from __future__ import annotations

import os

# Before any import of transformers: a test that reaches for the network fails at once instead of waiting.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("MPLBACKEND", "Agg")

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests import tiny_models as models
from tests.faults.report import Campaign

# The suite's models are too small for more; workers of pytest-xdist have a core each.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed the global generators, for libraries that use no others; our own randomness has explicit generators."""
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Process-wide settings, put back as they were."""
    dtype, grad, directory = torch.get_default_dtype(), torch.is_grad_enabled(), Path.cwd()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    os.chdir(directory)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return models.tiny_tokenizer()


@pytest.fixture(params=sorted(models.CAUSAL_LMS), ids=str)
def causal_lm(request: pytest.FixtureRequest) -> Callable[..., PreTrainedModel]:
    """The builder of a tiny causal language model, one architecture after the other."""
    return models.CAUSAL_LMS[request.param]


@pytest.fixture
def injected(record_property: Callable[[str, object], None]) -> Callable[[int], None]:
    """Return a function that records how many cases of its row of the campaign a test covers, if not one."""
    return lambda count: record_property("injected", count)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reliability", type=Path, metavar="FILE", help="write what the campaign reached, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Campaign(config.getoption("--reliability")))


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name functions among parameters: their address would differ from worker to worker."""
    return getattr(val, "__name__", None) if callable(val) else None
