"""Settings and fixtures of the whole suite.

Heavy libraries are imported where they are used: the controller of pytest-xdist reads this file, too, and its workers
start only afterwards.
"""

from __future__ import annotations

import gc
import os

# Before any import of transformers: a test that reaches for the network fails at once instead of waiting.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("MPLBACKEND", "Agg")
# Before any import of torch. The suite's models are too small for more; workers of pytest-xdist have a core each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults.report import Campaign

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed the global generators, for libraries that use no others; our own randomness has explicit generators."""
    import numpy as np
    import torch

    # torch.manual_seed seeds the other devices, too: without them it formats its stack for each, 0.7 ms a test
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Process-wide settings, put back as they were."""
    import torch

    dtype, grad, directory = torch.get_default_dtype(), torch.is_grad_enabled(), Path.cwd()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    os.chdir(directory)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    from tests.tiny_models import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture
def causal_lm(request: pytest.FixtureRequest) -> Callable[..., PreTrainedModel]:
    """The builder of a tiny causal language model, one architecture after the other."""
    from tests.tiny_models import CAUSAL_LMS

    return CAUSAL_LMS[request.param]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "causal_lm" in metafunc.fixturenames:
        from tests.tiny_models import CAUSAL_LMS

        metafunc.parametrize("causal_lm", sorted(CAUSAL_LMS), indirect=True)


@pytest.fixture
def injected(record_property: Callable[[str, object], None]) -> Callable[[int], None]:
    """Return a function that records how many cases of its row of the campaign a test covers, if not one."""
    return lambda count: record_property("injected", count)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reliability", type=Path, metavar="FILE", help="write what the campaign reached, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Campaign(config.getoption("--reliability")))


def pytest_collection_finish() -> None:
    # accelerate calls gc.collect() before and after a training: a third of a second for a million imported objects
    gc.freeze()


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name functions among parameters: their address would differ from worker to worker."""
    return getattr(val, "__name__", None) if callable(val) else None
