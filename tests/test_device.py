from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_bayes import BayesianTrainingArguments, SGHMCConfig
from tests import pretend_device, runs
from tests.device_checks import IS_GPU
from tests.device_paths import PATHS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Return the errors of each path, from a process of its own, since torch with the device behaves as on a GPU."""
    if not IS_GPU and pretend_device.compiler() is None:
        pytest.skip("the pretend accelerator is compiled, and this machine has no GPU and no C++ compiler")
    folder = tmp_path_factory.mktemp("device")
    out = folder / "found.json"
    library = [] if IS_GPU else [str(pretend_device.build(folder))]
    command = [sys.executable, "-m", "tests.device_paths", str(out), *library]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("path", PATHS)
def test_a_path_works_on_an_accelerator(path, found):
    assert found[path] is None, found[path]


def test_an_apple_gpu_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(BayesianTrainingArguments, "device", torch.device("mps"))
    with pytest.raises(ValueError, match=r"an Apple GPU \(mps\) has no float64"):
        runs.trainer(tmp_path, SGHMCConfig())
