from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes import EnsembleConfig, MeanFieldConfig, SGHMCConfig
from hf_bayes.diagnostics.convergence import ess, rhat
from tests import runs
from tests.tiny_models import tiny_bert
from tests.training.diagnosed import CONFIG, ONE_DRAW, run


def test_logits_reveal_chains_that_differ_in_wrong_classes_only(tmp_path: Path) -> None:
    """Planted draws: log p of the label is of one law, how the rest is shared among the others each chain's own."""
    rows = [{**row, "label": 0} for row in runs.label_rows(10)]
    config = SGHMCConfig(num_chains=4, prior_std=1.0, draws_per_chain=1)
    trainer = run(tmp_path, config, model=tiny_bert(), subspace="last_layer", train=rows, max_steps=1)
    for apart in (True, False):
        draws = torch.zeros(4, 100, trainer.bayesian.layout.dim)
        generator = torch.Generator().manual_seed(0)
        label, share = (torch.rand(4, 100, generator=generator) * 0.1 for _ in range(2))
        share += 0.2 * torch.arange(1, 5)[:, None] if apart else 0.5
        probs = torch.stack([0.5 + label, (0.5 - label) * share, (0.5 - label) * (1 - share)], 2)
        draws[..., -3:] = probs.log()  # biases, beside weights of 0
        trainer.run.draws = list(draws.unbind(1))
        found, trace = trainer.diagnosis.summary(trainer.posterior.approximation)
        assert found["values"] == "draws"
        assert max(found["rhat"], found["rhat_terms"]) < 1.05
        assert min(found["ess"], found["ess_terms"]) > 200
        assert (found["num_terms"], found["num_logits"]) == (10, 30)
        assert (found["rhat_logits"] > 1.5) == apart
        assert (f"R-hat {found['rhat_logits']:.2f} of logits over 4 chains" in found["verdict"]) == apart
        assert ("R-hat" in found["verdict"]) == apart
        assert len(trace["logits"]["rhat"]) == 30


def test_logs_tell_rhat_and_ess_of_the_looks_so_far(tmp_path: Path) -> None:
    trainer = run(tmp_path, ONE_DRAW, max_steps=48, probe_steps=1)
    entries = [entry for entry in trainer.state.log_history if "probe_rhat" in entry]
    steps = [30, 33, 36, 39, 42, 45, 48]  # burn-in: 24; R-hat needs four looks
    assert [entry["step"] for entry in entries] == steps
    looks = torch.stack(trainer.monitor.probes[24:], 1).sum(2, keepdim=True)
    sizes = [float(ess(looks[:, : step - 24])) for step in steps]
    assert math.isnan(sizes[0])  # too few looks for an estimate
    assert not math.isnan(sizes[-1])
    for entry, step, size in zip(entries, steps, sizes, strict=True):
        assert entry["probe_rhat"] == pytest.approx(float(rhat(looks[:, : step - 24])))
        assert entry.get("probe_ess", math.nan) == pytest.approx(size, nan_ok=True)
    found = trainer.posterior.config.diagnostics
    assert (found["rhat"], found["ess"]) == pytest.approx((entries[-1]["probe_rhat"], entries[-1]["probe_ess"]))
    assert trainer.posterior.trace["convergence"]["step"] == steps


@pytest.mark.filterwarnings("ignore:sghmc at temperature 0")
@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(ONE_DRAW, temperature=0.0),
        dataclasses.replace(CONFIG, schedule={"name": "cyclical"}),
        MeanFieldConfig(num_chains=2),
    ],
)
def test_looks_that_stand_for_no_draws_have_no_rhat_in_the_logs(tmp_path: Path, config: Any) -> None:
    trainer = run(tmp_path, config, probe_steps=1)
    assert not any("probe_rhat" in entry for entry in trainer.state.log_history)
    assert trainer.posterior.trace["convergence"] == {}


def test_rhat_and_ess_are_those_of_the_looks_after_burn_in(tmp_path: Path) -> None:
    trainer = run(tmp_path)
    found = trainer.posterior.config.diagnostics
    looks = torch.stack(trainer.monitor.probes[6:], 1)  # burn-in: 12 of 24 updates
    assert looks.shape == (3, 6, 70)  # ten rows: all there are, and fewer than the least
    total = looks.sum(2, keepdim=True)
    assert found["rhat"] == pytest.approx(float(rhat(total)))
    assert found["ess"] is None  # six looks of three chains are too few for an estimate
    assert math.isnan(ess(total))
    assert found["rhat_terms"] == pytest.approx(float(rhat(looks).sort().values[66]))  # 95 % of 70
    assert (found["num_values"], found["values"], found["num_terms"]) == (6, "probe evaluations", 70)


def test_draws_are_preferred_and_optimisers_get_no_rhat(tmp_path: Path) -> None:
    found = run(tmp_path, dataclasses.replace(CONFIG, draws_per_chain=4)).posterior.config.diagnostics
    assert (found["num_values"], found["values"]) == (4, "draws")
    for config in (
        EnsembleConfig(num_chains=3),
        dataclasses.replace(CONFIG, schedule={"name": "cyclical"}),
    ):
        found = run(tmp_path, config, max_steps=12, probe_steps=1).posterior.config.diagnostics
        assert found["rhat"] is None
        assert "R-hat" not in found["verdict"].replace("no R-hat", "")


def test_the_halves_of_a_single_chain_are_compared(tmp_path: Path) -> None:
    trainer = run(tmp_path, dataclasses.replace(CONFIG, num_chains=1), max_steps=38)
    found = trainer.posterior.config.diagnostics
    looks = torch.stack(trainer.monitor.probes[9:], 1)  # burn-in: 19 of 38 updates
    assert looks.shape == (1, 10, 70)
    halves = looks.view(2, 5, 70).sum(2, keepdim=True)
    assert found["rhat"] == pytest.approx(float(rhat(halves)))
    assert found["ess"] == pytest.approx(float(ess(looks.sum(2, keepdim=True))))
    assert "within chance for 10 values of each of 1 chain" in found["verdict"]
