from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.reports.step_lines import MAX_NUMBERS, short_line
from tests import runs

ROOT = Path(__file__).parents[3]


class Tracker(TrainerCallback):
    """A callback as TensorBoard's: keeps what it is handed."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("method", [SGHMCConfig(num_chains=8), HMCConfig(num_chains=8, num_leapfrog=2)], ids=str)
def test_a_step_prints_few_numbers_and_tracks_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: Any, silent: bool
) -> None:
    tracker = Tracker()
    trainer = runs.trainer(tmp_path, method, callbacks=[tracker], max_steps=2, disable_tqdm=silent)
    trainer.train()
    lines = re.findall(r"\{'loss.*\}", capsys.readouterr().out)
    assert len(lines) == 2
    assert all(len(eval(line)) <= MAX_NUMBERS and "chain_" not in line for line in lines)
    for kept in (tracker.logs[0], trainer.state.log_history[0]):
        assert {f"loss/chain_{chain}" for chain in range(8)} <= kept.keys()


def test_a_line_holds_means_over_chains() -> None:
    chains = {f"kinetic_temperature/chain_{k}": 1.0 + k for k in range(3)} | {"loss/chain_0": 9.0}
    assert short_line({"loss": 2.0, **chains, "epoch": 1.0}) == {"loss": 2.0, "kinetic_temperature": 2.0, "epoch": 1.0}
    others = {f"mine_{index}": float(index) for index in range(20)}
    assert short_line({**others, **chains}) == others  # other code's numbers are never dropped


def test_callbacks_are_found_by_the_names_of_transformers(tmp_path: Path) -> None:
    for kind, silent in ((PrinterCallback, True), (ProgressCallback, False)):
        trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), disable_tqdm=silent)
        assert isinstance(trainer.pop_callback(kind), kind)


RUN = """
from hf_bayes import SGHMCConfig
from tests import runs
from tests.tiny_models import tiny_tokenizer
trainer = runs.trainer(OUTPUT, SGHMCConfig(num_chains=8), max_steps=10, disable_tqdm=SILENT, logging_steps=1,
                       eval_dataset=runs.token_rows(6, seed=3), processing_class=tiny_tokenizer())
print("BEGIN")
trainer.train()
trainer.save_model()
"""


@pytest.mark.slow
@pytest.mark.parametrize("silent", [True, False])
def test_ten_steps_print_at_most_15_lines(tmp_path: Path, silent: bool) -> None:
    """Count the lines of both streams, without progress bars and the output of imports of other libraries."""
    program = RUN.replace("OUTPUT", repr(str(tmp_path))).replace("SILENT", str(silent))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore:`is_gradient:FutureWarning"}
    command = [sys.executable, "-u", "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=-1, stderr=-2, text=True, check=True)
    said = done.stdout.split("BEGIN")[1].replace("\r", "\n").splitlines()
    lines = [line for line in said if line.strip() and not re.search(r"\d+%\|.*it/s\]|\?it/s\]|\d+/\d+ \[", line)]
    assert len(lines) <= 15, "\n".join(lines)
    assert sum(line.startswith("{'loss") for line in lines) == 10
