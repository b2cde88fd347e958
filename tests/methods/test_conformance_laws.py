"""Every sampler has its stationary law on a Gaussian target, and methods with a limit T = 0 find the mode there."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import generator
from hf_bayes.distributions.approximations import Draws
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from tests.methods.conformance import MEAN, ROWS, N, Row, cold, exact, gaussian, sampled, starts

REPOSITORY = Path(__file__).parents[2]


def gaussian_members(row: Row, temperature: float) -> Tensor:
    """Return the draws [chains, draws, d] of the approximation on the Gaussian target."""
    theta = MEAN + math.sqrt(exact(1.0)) * starts(*row.shape)
    result = sample(
        gaussian,
        theta,
        dataclasses.replace(row.config, temperature=temperature),
        num_steps=row.num_steps,
        learning_rate=row.learning_rate,
        num_data=N,
        burn_in=row.num_steps // 5,
        seed=5,
        **row.data,
    )
    if isinstance(result.approximation, Draws):
        assert torch.equal(result.approximation.theta, result.draws.flatten(0, 1))
        return result.draws
    return result.approximation.sample(2000, generator("members"))[None]


def assert_gaussian_moments(members: Tensor, variance: float) -> None:
    """Check the pooled mean and variance within 4 standard errors, from the spread of the coordinates' means."""
    centred = members - MEAN
    for power, expected in ((centred, 0.0), (centred.square(), variance)):
        means = power.mean(1).flatten()
        standard_error = means.std() / math.sqrt(len(means))
        assert 4 * standard_error < (0.2 * variance if expected else 0.2 * math.sqrt(variance))  # enough draws to tell
        assert (means.mean() - expected).abs() < 4 * standard_error + 0.01 * expected  # 1 %: mean_field's promise


@sampled
@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.statistics
def test_gaussian_moments_are_those_of_its_law(row: Row, temperature: float) -> None:
    assert row.law is not None
    assert_gaussian_moments(gaussian_members(row, temperature), row.law(temperature))


@sampled
@pytest.mark.statistics
def test_the_moment_check_catches_half_the_temperature(row: Row) -> None:
    assert row.law is not None
    members = gaussian_members(row, 0.5)
    with pytest.raises(AssertionError):
        assert_gaussian_moments(members, row.law(1.0))


@pytest.mark.statistics
@cold
@pytest.mark.filterwarnings("ignore:.*no posterior samples")
def test_zero_temperature_ends_in_the_mode_for_every_seed(row: Row) -> None:
    config = dataclasses.replace(row.config, temperature=0.0)
    ends = []
    for seed in (1, 2):
        result = sample(
            gaussian, starts(2, 5), config, num_steps=1000, learning_rate=row.learning_rate, num_data=N, seed=seed
        )
        ends.append(result.approximation.sample(2, generator("members")))
        assert (result.draws[:, -1] - MEAN).abs().max() < 1e-3  # of a start at distance 1
    assert torch.equal(*ends) or row.noise


warm = {name: row for name, row in ROWS.items() if not row.cold and type(row.config).temperature > 0}


@pytest.mark.parametrize("row", warm.values(), ids=warm.keys())
def test_methods_without_a_cold_limit_refuse_zero_temperature(row: Row) -> None:
    with pytest.raises(ValueError, match="temperature must be > 0, got 0"):
        dataclasses.replace(row.config, temperature=0.0)


@pytest.mark.statistics
def test_the_worked_example_of_the_documentation_keeps_its_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (REPOSITORY / "docs" / "add_a_method.md").read_text(encoding="utf-8")
    source, *_ = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "shared_noise.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("shared_noise")
    row = Row(config=module.SharedNoiseConfig(), learning_rate=0.5, law=exact)
    assert_gaussian_moments(gaussian_members(row, 1.0), exact(1.0))
    with pytest.raises(AssertionError):  # SGLD's law at this step size is 1.33 times as wide
        assert_gaussian_moments(gaussian_members(dataclasses.replace(row, config=SGLDConfig()), 1.0), exact(1.0))
