from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.schedules import Cyclical, Linear, RobbinsMonro, Schedule, draw_steps
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.registry import METHODS, from_dict
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.sgmcmc.sgnht import SGNHTConfig
from tests import runs

N = 10


def cosine(step: int, length: int) -> float:
    """Return l / l_0 = C(t)^2 for a cycle that starts at step 0."""
    return ((math.cos(math.pi * (step % length) / length) + 1) / 2) ** 2


# ---------------------------------------------------------------------------------------------------- the schedules


def test_thirty_cycles_with_three_of_burn_in_match_the_paper() -> None:
    """The run of cold_posteriors app. A.1: 1500 epochs, cycles of 50, sampling begins at epoch 150, 27 draws."""
    draws = draw_steps(1500, burn_in=150, draws=27, thin=None)
    assert list(draws) == list(range(200, 1501, 50))
    rates = [Cyclical().learning_rate(step, draws) for step in range(1500)]
    assert rates == pytest.approx([cosine(step, 50) for step in range(1500)])
    assert all(rates[draw - 1] < 1e-5 for draw in draws)  # the draw is taken after the slowest update,
    assert all(rates[draw] == 1 for draw in draws[:-1])  # and a cycle begins at the peak


def test_what_does_not_fill_a_cycle_comes_first_and_at_the_peak() -> None:
    draws = draw_steps(23, burn_in=5, draws=2, thin=None)
    assert list(draws) == [14, 23]
    rates = [Cyclical().learning_rate(step, draws) for step in range(23)]
    assert rates[:5] == [1.0] * 5
    assert rates[5:] == pytest.approx([cosine(step, 9) for step in range(18)])


def test_temperature_ramps_up_from_zero_within_each_cycle() -> None:
    schedule, draws = Cyclical(ramp_up=0.5), range(8, 17, 8)
    warmth = [schedule.temperature(step, draws) for step in range(16)]
    assert warmth == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1] * 2
    assert {Cyclical().temperature(step, draws) for step in range(16)} == {1.0}


def test_robbins_monro_is_a_power_law_with_its_peak_at_the_start() -> None:
    schedule = RobbinsMonro(offset=20.0, exponent=0.7)
    scale = 20.0**0.7  # a / l_0
    for step in (0, 1, 50, 10_000):
        assert schedule.learning_rate(step, range(0)) == pytest.approx(scale * (20 + step) ** -0.7)


@pytest.mark.parametrize("draws", [range(8, 9), range(4, 9, 4), range(2, 9, 3)], ids=str)
def test_linear_falls_from_the_peak_to_its_nth_part_in_n_updates(draws: range) -> None:
    rates = [Linear().learning_rate(step, draws) for step in range(8)]
    assert rates == [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]  # exact in binary
    assert {Linear().temperature(step, draws) for step in range(8)} == {1.0}
    assert not Linear().has_ramp


# ------------------------------------------------------------------------------------------- hf_bayes.sample honours it


def rates_of(schedule: Schedule, *, num_steps: int, **changes: Any) -> list[float]:
    """Return l_t of a run, from SGLD at T = 0 on U = N theta^2 / 2, where theta shrinks by 1 - l_t."""
    seen: list[float] = []

    def energy(theta: Tensor, batch: None) -> Tensor:
        seen.append(theta[0, 0].item())
        return 0.5 * N * theta.square().sum(1)

    config = SGLDConfig(temperature=0.0, schedule=schedule)
    start = torch.ones(1, 1, dtype=torch.float64)
    with pytest.warns(UserWarning, match="temperature 0"):
        result = sample(energy, start, config, num_steps=num_steps, learning_rate=0.1, num_data=N, **changes)
    seen.append(result.state.theta.item())
    return [1 - after / before for before, after in itertools.pairwise(seen)]


def test_sample_follows_the_schedule_and_draws_at_cycle_ends() -> None:
    assert rates_of(Cyclical(), num_steps=20, thin=10) == pytest.approx([0.1 * cosine(s, 10) for s in range(20)])
    assert rates_of(RobbinsMonro(offset=3.0), num_steps=5) == pytest.approx(
        [0.1 * (1 + s / 3) ** -0.55 for s in range(5)]
    )
    assert rates_of(Linear(), num_steps=8, thin=4) == pytest.approx([0.1 * (1 - s / 8) for s in range(8)])


def test_updates_after_the_last_draw_keep_linears_last_rate() -> None:
    assert rates_of(Linear(), num_steps=6, thin=4) == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.025, 0.025])


def test_the_schedule_begins_after_a_warm_start() -> None:
    info = sample(
        lambda theta, batch: 0.5 * N * theta.square().sum(1),
        torch.ones(1, 3),
        SGHMCConfig(warm_start_steps=4, schedule=Cyclical(ramp_up=0.5)),
        num_steps=20,
        learning_rate=0.1,
        num_data=N,
        burn_in=4,
        thin=8,
    ).info
    law = info["kinetic_temperature_law"][:, 0]  # 2 T_t / (1 + beta_t)
    assert law[:4].isnan().all()
    expected = [2 * min(1, step % 8 / 4) / (2 - 0.1 * math.sqrt(cosine(step, 8))) for step in range(16)]
    assert law[4:].tolist() == pytest.approx(expected, rel=1e-6)


def test_noise_has_the_temperature_of_its_update() -> None:
    config = SGLDConfig(temperature=3.0, schedule=Cyclical(ramp_up=0.5))
    start = torch.zeros(1, 4, dtype=torch.float64)
    flat = sample(lambda theta, batch: 0 * theta.sum(1), start, config, num_steps=8, learning_rate=0.1, thin=8, seed=2)
    rng, theta = generator(2, "chain", 0), torch.zeros(4, dtype=torch.float64)
    for step in range(8):
        variance = 2 * 0.1 * cosine(step, 8) * 3.0 * min(1, step / 4)
        theta += math.sqrt(variance) * torch.randn(4, generator=rng, dtype=torch.float64)
    assert (flat.draws[0, 0] - theta).abs().max() < 1e-14


def law_of(config: MethodConfig, rates: list[float], variance: float) -> float:
    """Return N E theta^2 on U = N theta^2 / 2 after these updates from theta = 0, with noise in the gradient of U.

    Moments of (theta, m) go from update to update by the docstring's map at that update's h; sgld has no m.
    """
    moments = torch.diag(torch.tensor([0.0, 1.0], dtype=torch.float64))
    for rate in rates:
        h = math.sqrt(rate / N)
        if isinstance(config, SGLDConfig):
            decay, injected = 0.0, 2.0
        else:
            friction = (1 - config.momentum) * math.sqrt(N / rates[0])  # type: ignore[attr-defined]
            decay, injected = 1 - h * friction, 2 * h * friction
        kick = torch.tensor([h, 1.0], dtype=torch.float64)
        through = torch.tensor([[1 - h**2 * N, h * decay], [-h * N, decay]], dtype=torch.float64)
        moments = through @ moments @ through.T + (injected + h**2 * variance) * torch.outer(kick, kick)
    return N * moments[0, 0].item()


@pytest.mark.parametrize("schedule", [Cyclical(), RobbinsMonro(offset=5, exponent=0.9), Linear()], ids=lambda s: s.name)
@pytest.mark.parametrize("config", [SGLDConfig(), SGHMCConfig(momentum=0.8)], ids=lambda c: c.name)
@pytest.mark.parametrize("variance", [0.0, 20.0])
def test_final_variance_is_that_of_the_scheduled_discretisation(
    config: MethodConfig, schedule: Schedule, variance: float
) -> None:
    peak, num_steps, noise = 0.8, 60, generator("gradient")

    def energy(theta: Tensor, batch: None) -> Tensor:
        noisy = math.sqrt(variance) * torch.randn(theta.shape, generator=noise) if variance else 0.0
        return (0.5 * N * theta.square() + noisy * theta).sum(1)

    draws = sample(
        energy,
        torch.zeros(4, 2**14),
        dataclasses.replace(config, schedule=schedule),
        num_steps=num_steps,
        learning_rate=peak,
        num_data=N,
        thin=num_steps,
    ).draws
    steps = range(num_steps, num_steps + 1, num_steps)
    expected = law_of(config, [peak * schedule.learning_rate(step, steps) for step in range(num_steps)], variance)
    got = N * draws.double().square().mean().item()
    assert got == pytest.approx(expected, rel=0.022)  # 4 standard errors of 65 536 squares
    # the broken twin: the schedule is not followed
    assert got != pytest.approx(law_of(config, [peak] * num_steps, variance), rel=0.022)


# ------------------------------------------------------------------------------------------------ every rule takes it


KERNELS = ("hmc", "metropolis", "gps", "penalty")
RULES = [
    name for name, kind in METHODS.items() if name not in KERNELS and kind().requirements.heldout == "none"
]  # sample has no held-out rows


def in_a_bowl(config: MethodConfig, **changes: Any) -> Tensor:
    """Return the draws [2, 3, 3] of a run, by default of three cycles."""
    arguments = {"num_steps": 12, "learning_rate": 0.01, "thin": 4} | changes
    return sample(lambda theta, batch: theta.square().sum(1), torch.ones(2, 3), config, **arguments).draws


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("schedule", [Cyclical(), Cyclical(ramp_up=0.5), RobbinsMonro(offset=10.0), Linear()], ids=str)
def test_rules_run_under_any_schedule_or_refuse_zero_temperature(name: str, schedule: Schedule) -> None:
    # three parameters, and a flat prior
    needed: dict[str, Any] = {"low_rank_vi": {"rank": 2}, "ekf": {"init_std": 1.0}}
    config = METHODS[name](schedule=schedule, **needed.get(name, {}))
    if (
        name in ("sgnht", "mean_field", "ivon", "low_rank_vi", "full_rank_vi", "blob", "ekf", "laplace", "agps")
        and schedule.has_ramp
    ):
        with pytest.raises(ValueError, match=f"starts its cycles at T = 0, but {name}: temperature must be > 0"):
            in_a_bowl(config)
        return
    draws = in_a_bowl(config)
    assert draws.shape == (2, 3, 3)
    assert draws.isfinite().all()


IGNORING = [
    HMCConfig(), METHODS["metropolis"](), METHODS["gps"](), METHODS["penalty"](num_leapfrog=1),
    METHODS["agps"](max_std=0.5),
]  # fmt: skip


@pytest.mark.parametrize("config", IGNORING, ids=lambda config: config.name)
def test_methods_with_their_own_steps_refuse_a_schedule(tmp_path: Any, config: MethodConfig) -> None:
    words = f"{config.name} sets its step sizes itself and would ignore "
    with pytest.raises(ValueError, match=f"{words}schedule='cyclical'"):
        in_a_bowl(dataclasses.replace(config, schedule=Cyclical()))
    with pytest.raises(ValueError, match=f"{words}a function as learning_rate"):
        in_a_bowl(config, learning_rate=lambda step: 0.1)
    with pytest.raises(ValueError, match=f"{words}lr_scheduler_type='cosine'"):
        runs.trainer(tmp_path, config, lr_scheduler_type="cosine", gradient_accumulation_steps=3)


# --------------------------------------------------------------------------------------------- the trainer honours it


class Rates(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_begin(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


@pytest.mark.models
def test_trainer_follows_the_schedule_and_draws_at_cycle_ends(tmp_path: Any) -> None:
    rates = Rates()
    method = SGHMCConfig(num_chains=2, draws_per_chain=2, burn_in=0.2, schedule=Cyclical(ramp_up=0.5))
    trainer = runs.trainer(tmp_path, method, max_steps=10, callbacks=[rates])
    trainer.train()
    assert rates.seen == pytest.approx([0.01, 0.01] + [0.01 * cosine(step, 4) for step in range(8)])
    assert list(trainer.run.problem.draw_steps) == [6, 10]
    assert trainer.posterior.approximation.num_stored == 4
    assert from_dict(trainer.posterior.config.method) == method


@pytest.mark.models
def test_a_run_resumed_within_a_cycle_is_bitwise_the_same(tmp_path: Any) -> None:
    method = SGHMCConfig(num_chains=2, draws_per_chain=2, burn_in=0.2, schedule=Cyclical(ramp_up=0.5))
    whole = runs.trainer(tmp_path, method, max_steps=10, save_strategy="steps", save_steps=4)
    whole.train()
    resumed = runs.trainer(tmp_path, method, max_steps=10)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert runs.equal(whole.posterior.approximation, resumed.posterior.approximation)


# ------------------------------------------------------------------------------------------------------- refusals


def test_two_schedules_at_once_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"lr_scheduler_type='cosine' and sghmc's own schedule='cyclical' are two"):
        runs.trainer(tmp_path, SGHMCConfig(schedule=Cyclical()), lr_scheduler_type="cosine")
    with pytest.raises(ValueError, match="a function as learning_rate and sgld's own schedule='cyclical' are two"):
        in_a_bowl(SGLDConfig(schedule=Cyclical()), learning_rate=lambda step: 0.1)


def test_more_cycles_than_updates_are_refused(tmp_path: Any) -> None:
    for draws, message in (
        (9, "cannot give 9 draws per chain .would collect 0 samples"),
        (6, "at least 2 updates, got 1"),
    ):
        method = SGHMCConfig(schedule=Cyclical(), draws_per_chain=draws, burn_in=0)
        with pytest.raises(ValueError, match=message):
            runs.trainer(tmp_path, method, max_steps=6).train()
    with pytest.raises(ValueError, match="at least 2 updates, got 1 from one draw to the next"):
        rates_of(Cyclical(), num_steps=20)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("cyclical", "schedule must be None, a Schedule or a mapping, got 'cyclical'"),
        ({}, "schedule must be a mapping with a name of cyclical, robbins_monro, linear, got None"),
        ({"name": "stairs"}, "schedule must be a mapping with a name of cyclical, robbins_monro, linear, got 'stairs'"),
        (
            {"name": "cyclical", "num_cycles": 3},
            r"'cyclical' must be given ramp_up, exponent and nothing else, got \['num_cycles'\]",
        ),
        ({"name": "cyclical", "ramp_up": 1.0}, r"'cyclical': ramp_up must be a finite number in \[0, 1\), got 1.0"),
        ({"name": "cyclical", "exponent": 0}, "'cyclical': exponent must be a finite number > 0, got 0"),
        ({"name": "robbins_monro"}, "'robbins_monro' must be given offset, exponent"),
        ({"name": "linear", "end": 0.1}, r"'linear' must be given  and nothing else, got \['end'\]"),
        ({"name": "robbins_monro", "offset": 0}, "offset must be a finite number > 0, got 0"),
        ({"name": "robbins_monro", "offset": "9"}, "offset must be a finite number > 0, got '9'"),
        ({"name": "robbins_monro", "offset": 9, "exponent": 0.5}, r"exponent must be .* in \(1/2, 1\], got 0.5"),
    ],
)
def test_other_schedules_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SGHMCConfig(schedule=values)


@pytest.mark.parametrize("schedule", [Cyclical(ramp_up=0.3), RobbinsMonro(offset=7.0, exponent=1), Linear()], ids=str)
def test_a_schedule_survives_json(schedule: Schedule) -> None:
    config = SGNHTConfig(schedule=schedule)
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert SGNHTConfig(schedule=dataclasses.asdict(schedule)) == config  # type: ignore[arg-type]
