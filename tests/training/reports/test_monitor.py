from __future__ import annotations

import pytest
import torch

from hf_bayes.chains.run import Run
from hf_bayes.core.layout import per_tensor_mean
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.objectives.probe import ProbeValues
from hf_bayes.training.reports.monitor import Monitor
from tests.chains.normal_objective import CHAINS, SIZES, normal_run


def watched(run: Run, *, probe_steps: int = 0) -> Monitor:
    def probe(theta: torch.Tensor) -> ProbeValues:
        return ProbeValues(theta[:, :2].double(), theta[:, :1])

    return Monitor(SIZES, run.problem, run.theta.clone(), warm_start=0, probe=probe, probe_steps=probe_steps)


def test_means_of_diagnostics_leave_burn_in_out() -> None:
    run = normal_run(SGHMCConfig())
    monitor, seen = watched(run), []
    for _ in range(5):
        record = run.update([None], 0.01)
        monitor.observe(record)
        seen.append(record.info["kinetic_temperature"].double())
    torch.testing.assert_close(monitor.mean_info()["kinetic_temperature"], torch.stack(seen[2:]).mean(0))


def test_kinetic_temperature_of_tensors_is_a_mean_after_burn_in() -> None:
    run = normal_run(SGHMCConfig())
    monitor, seen = watched(run), []
    for _ in range(5):
        monitor.observe(run.update([None], 0.01))
        seen.append(per_tensor_mean(run.state.momentum.double().square(), SIZES))
    torch.testing.assert_close(monitor.totals["kinetic_of_tensors"], torch.stack(seen[2:]).sum(0), rtol=1e-5, atol=0.0)
    assert monitor.totals["kinetic_law"].tolist() == pytest.approx([3 * 2 / 1.9] * CHAINS)


def test_observations_go_on_bitwise_from_their_tensors() -> None:
    run = normal_run(SGHMCConfig())
    whole, resumed = watched(run, probe_steps=2), watched(run, probe_steps=2)
    for step in range(5):
        if step == 3:
            resumed.load_state_dict({name: value.clone() for name, value in whole.state_dict().items()})
        record = run.update([None], 0.01)
        whole.observe(record)
        if step >= 3:
            resumed.observe(record)
    found, expected = resumed.state_dict(), whole.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert expected["probes"].shape == (CHAINS, 2, 2)
    assert all(Monitor.holds(name) for name in expected)
    assert not any(Monitor.holds(name) for name in run.state_dict())


def test_the_share_of_unmoved_weights_is_that_of_the_first_move() -> None:
    run = normal_run(SGHMCConfig())
    monitor = watched(run)
    monitor.observe(run.update([None], 0.0))
    assert "unmoved" not in monitor.totals
    monitor.observe(run.update([None], 0.01))
    assert monitor.totals["unmoved"].tolist() == [0.0] * CHAINS
    assert monitor.totals["rates"].tolist() == pytest.approx([0.01] * CHAINS)
