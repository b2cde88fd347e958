from __future__ import annotations

from pathlib import Path

import pytest

from hf_bayes.training.tuning.tune import Tuning
from tests.training.tuning.tuned import call


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tuning]:
    directory = tmp_path_factory.mktemp("tuned")
    return directory, call(directory)
