"""The conformance table: one row per method, and the tests that every method passes."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_bayes
import hf_bayes.chains.sampling
from hf_bayes.chains.sampling import SampleResult, sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.schedules import RobbinsMonro
from hf_bayes.core.types import Evaluation, Kernel, Problem, Rule
from hf_bayes.distributions.approximations import Draws
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.averaging.mc_dropout import MCDropoutConfig
from hf_bayes.methods.averaging.sgd_mc import SGDMCConfig
from hf_bayes.methods.averaging.snapshot import SnapshotConfig
from hf_bayes.methods.averaging.swa import SWAConfig
from hf_bayes.methods.averaging.swag import SWAGConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.mcmc.gps import GPSConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.mcmc.penalty import PenaltyConfig
from hf_bayes.methods.registry import METHODS, build, from_dict
from hf_bayes.methods.sgmcmc.agps import AGPSConfig
from hf_bayes.methods.sgmcmc.baoab import BAOABConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sghmc_euler import SGHMCEulerConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.sgmcmc.sgnht import SGNHTConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig

N = 10
MEAN = 0.5  # of the Gaussian target U = N |theta - MEAN|^2 / 2
REPOSITORY = Path(__file__).parents[2]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The facts about a method that the table's tests need.

    Attributes:
        config: an instance with its own fields away from their defaults.
        learning_rate: a learning rate that suits the Gaussian target.
        law: temperature -> stationary variance on the Gaussian target (of the discretisation); None for optimisers.
        shape: [M, d] of the Gaussian run, with M d >= 256 independent coordinates.
        num_steps: number of updates of the Gaussian run; a fifth of them is burn-in.
        noise: the method draws random numbers.
        cold: the method has a limit T = 0, where it finds the mode; if not, it refuses T = 0, unless it is an optimiser
            of another function than U.
        batches: number of batches per update, for methods that need them; each is the whole data here.
    """

    config: MethodConfig
    learning_rate: float
    law: Callable[[float], float] | None
    shape: tuple[int, int] = (4, 64)
    num_steps: int = 1500
    noise: bool = True
    cold: bool = False
    batches: int = 0

    @property
    def data(self) -> dict[str, Any]:
        """Return the arguments of ``sample``."""
        return {"batches": [None], "batches_per_step": self.batches} if self.batches else {}


def exact(temperature: float) -> float:
    return temperature / N


def sghmc_law(temperature: float) -> float:
    return exact(temperature) / (1 - 0.1 / (2 * (1 + 0.8)))


def sgld_law(temperature: float) -> float:
    return exact(temperature) / (1 - 0.1 / 2)


def sgnht_law(temperature: float) -> float:
    return exact(temperature) * (1 - (1.95 - math.sqrt(1.95**2 - 4 * 0.4)) / 4)


def sghmc_euler_law(temperature: float) -> float:
    return exact(temperature) * 0.2 * (1.8 + 0.1) / ((0.2 - 0.1) * (1.8 + 0.05))


ROWS = {
    "sghmc": Row(config=SGHMCConfig(momentum=0.8), learning_rate=0.1, law=sghmc_law, cold=True),
    "sgld": Row(config=SGLDConfig(), learning_rate=0.1, law=sgld_law, cold=True),
    "baoab": Row(config=BAOABConfig(momentum=0.8, scheme="baoa"), learning_rate=0.1, law=exact, cold=True),
    "sgnht": Row(config=SGNHTConfig(momentum=0.8, thermostat_steps=6.0), learning_rate=0.1, law=sgnht_law),
    "sghmc_euler": Row(config=SGHMCEulerConfig(momentum=0.8), learning_rate=0.1, law=sghmc_euler_law, cold=True),
    "map": Row(config=MAPConfig(momentum=0.8), learning_rate=0.01, law=None, noise=False, cold=True),
    "ensemble": Row(config=EnsembleConfig(num_chains=5), learning_rate=0.01, law=None, noise=False, cold=True),
    "mean_field": Row(config=MeanFieldConfig(init_std=0.05), learning_rate=0.01, law=exact),
    "metropolis": Row(
        config=MetropolisConfig(target_acceptance=0.3), learning_rate=0.3, law=exact, shape=(128, 2), num_steps=1000
    ),
    "hmc": Row(config=HMCConfig(num_leapfrog=4), learning_rate=0.1, law=exact, shape=(8, 32), num_steps=300),
    "laplace": Row(
        config=LaplaceConfig(structure="kronecker", num_samples=2), learning_rate=0.01, law=None, noise=False
    ),
    "penalty": Row(
        config=PenaltyConfig(num_leapfrog=3, proposal_batches=2, target_acceptance=0.7),
        learning_rate=0.1,
        law=exact,
        shape=(16, 16),
        num_steps=300,
        batches=4,
    ),
    "agps": Row(config=AGPSConfig(max_std=0.8), learning_rate=0.1, law=exact, num_steps=6000),
    "gps": Row(config=GPSConfig(max_std=1.0), learning_rate=0.1, law=exact, shape=(128, 2), num_steps=600),
    "sgd_mc": Row(config=SGDMCConfig(momentum=0.5), learning_rate=0.1, law=None, noise=False, cold=True),
    "snapshot": Row(
        config=SnapshotConfig(momentum=0.8, schedule=None), learning_rate=0.1, law=None, noise=False, cold=True
    ),
    "swa": Row(config=SWAConfig(momentum=0.0, optimizer="sgd"), learning_rate=0.5, law=None, noise=False, cold=True),
    "swag": Row(
        config=SWAGConfig(momentum=0.0, rank=3, optimizer="sgd"), learning_rate=0.5, law=None, noise=False, cold=True
    ),
    "mc_dropout": Row(config=MCDropoutConfig(dropout=0.3, num_masks=2), learning_rate=0.01, law=None),
}

rows = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
noisy = pytest.mark.parametrize(
    "row", [r for r in ROWS.values() if r.noise], ids=[k for k, r in ROWS.items() if r.noise]
)
sampled = pytest.mark.parametrize("row", [r for r in ROWS.values() if r.law], ids=[k for k, r in ROWS.items() if r.law])
cold = pytest.mark.parametrize("row", [r for r in ROWS.values() if r.cold], ids=[k for k, r in ROWS.items() if r.cold])


def gaussian(theta: Tensor, batch: object) -> Tensor:
    return 0.5 * N * (theta - MEAN).square().sum(1)


def rough(theta: Tensor, batch: object) -> Tensor:
    """Return an ordinary energy with coupled coordinates and several minima."""
    return N * (0.5 * theta.square() + (2 * theta).cos() + 0.1 * theta * theta.roll(1, 1)).sum(1)


def starts(num_chains: int, dim: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(num_chains, dim, generator=generator("starts"), dtype=dtype).to(device)


def run(row: Row, theta: Tensor, *, num_steps: int = 12, seed: int = 0, **changes: Any) -> SampleResult:
    config = dataclasses.replace(row.config, **changes)
    return sample(
        rough,
        theta,
        config,
        num_steps=num_steps,
        learning_rate=row.learning_rate,
        num_data=N,
        burn_in=4,
        seed=seed,
        **row.data,
    )


# ---------------------------------------------------------------------------------------------------- shapes and types


@rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
def test_shapes_dtype_and_device_follow_theta(row: Row, dtype: torch.dtype, device: str) -> None:
    result = run(row, starts(3, 5, dtype, device))
    mean, members = result.approximation.mean, result.approximation.sample(2, generator("members"))  # of the CPU
    assert (result.draws.shape, mean.shape, members.shape) == ((3, 8, 5), (5,), (2, 5))
    for tensor in (result.draws, mean, members, result.state.theta):
        assert (tensor.dtype, tensor.device.type) == (dtype, device)
    for name, values in result.info.items():
        assert values.shape == (12, 3), name
        assert values.device.type == device, name


@rows
@pytest.mark.parametrize("warm_start_steps", [0, 2])
def test_state_is_a_named_tuple_of_tensors_with_members_first(row: Row, warm_start_steps: int) -> None:
    state = run(row, starts(3, 5), warm_start_steps=warm_start_steps).state
    for name, tensor in state._asdict().items():
        assert isinstance(tensor, Tensor), name
        assert len(tensor) == 3, name
    assert state.theta.shape == (3, 5)
    assert state.step.dtype == torch.int64


@rows
def test_draws_are_finite_and_chains_move(row: Row) -> None:
    result = run(row, starts(3, 5), num_steps=40)
    assert result.draws.isfinite().all()
    assert (result.draws[:, -1] != starts(3, 5)).any(1).all()


# ------------------------------------------------------------------------------------------------------ randomness


@rows
def test_same_seed_gives_the_same_draws(row: Row) -> None:
    assert torch.equal(run(row, starts(3, 5), seed=7).draws, run(row, starts(3, 5), seed=7).draws)


@noisy
def test_another_seed_gives_other_draws_in_every_chain(row: Row) -> None:
    one, two = run(row, starts(3, 5), seed=7), run(row, starts(3, 5), seed=8)
    assert (one.draws != two.draws).flatten(1).any(1).all()


@rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_of_a_chain_do_not_depend_on_the_number_of_chains(row: Row, dtype: torch.dtype) -> None:
    many = run(row, starts(5, 7, dtype)).draws
    assert torch.equal(many[:2], run(row, starts(5, 7, dtype)[:2]).draws)


def largest_correlation(row: Row) -> float:
    """Return the correlation between the moves of any two of 4 chains from one start, over 4096 equal coordinates."""
    start = torch.full((4, 4096), MEAN)

    def flat(theta: Tensor, batch: object) -> Tensor:
        return 1e-4 * gaussian(theta, batch)  # so flat that every proposal is accepted

    result = sample(flat, start, row.config, num_steps=3, learning_rate=1e-3, num_data=N, **row.data)
    moved = result.draws[:, -1] - start
    return (torch.corrcoef(moved) - torch.eye(4)).abs().max().item()


@pytest.mark.reliability("F13")
@noisy
def test_chains_are_independent(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 4 / math.sqrt(4096)  # 4 standard errors
    assert largest_correlation(row) < limit
    # the broken twin: one seed for all chains
    monkeypatch.setattr(
        hf_bayes.chains.sampling,
        "chain_generators",
        lambda seed, count, device: [generator(seed) for _ in range(count)],
    )
    assert largest_correlation(row) > limit


@rows
def test_global_random_state_is_neither_used_nor_moved(row: Row) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = run(row, starts(2, 3)).draws
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(run(row, starts(2, 3)).draws, one)


# ------------------------------------------------------------------------------------------------ purity and resuming


class Drive:
    """A method that the test advances by hand, like a trainer."""

    def __init__(self, config: MethodConfig, row: Row, num_chains: int) -> None:
        problem = Problem(N, FlatPrior(), row.learning_rate, num_steps=12, burn_in=6, shapes={"": (5,)})
        self.method = build(config, problem)
        self.row = row
        self.rngs = [generator(3, "chain", chain) for chain in range(num_chains)]
        self.state: Any = None

    @staticmethod
    def evaluate(theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation:
        leaf = theta.detach().requires_grad_()
        value = rough(leaf, None)
        (grad,) = torch.autograd.grad(value.sum(), leaf)
        columns = -value.detach()[:, None].expand(-1, 4)[:, batches or slice(None)]
        return Evaluation(-value.detach(), -grad if gradient else None, batch_log_lik=columns)

    def begin(self, theta: Tensor) -> Drive:
        args = (theta, self.evaluate, self.rngs) if isinstance(self.method, Kernel) else (theta, self.rngs)
        self.state = self.method.init(*args)  # type: ignore[call-arg]
        return self

    def advance(self) -> None:
        if isinstance(self.method, Kernel):
            self.state, _ = self.method.step(self.state, self.evaluate, self.rngs)
            return
        theta, self.state = self.method.locate(self.state, self.rngs)
        self.state, _ = self.method.update(self.state, self.evaluate(theta), self.row.learning_rate, self.rngs)

    def saved(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        tensors = {name: tensor.clone() for name, tensor in self.state._asdict().items()}
        return tensors, [rng.get_state().clone() for rng in self.rngs]

    def restore(self, tensors: dict[str, Tensor], rng_states: list[Tensor]) -> Drive:
        self.begin(torch.zeros(len(self.rngs), 5))  # for the state's type only
        self.state = type(self.state)(**tensors)
        for rng, rng_state in zip(self.rngs, rng_states, strict=True):
            rng.set_state(rng_state)
        return self


@rows
@pytest.mark.parametrize("warm_start_steps", [0, 4])
def test_a_run_restored_at_any_update_continues_bitwise(row: Row, warm_start_steps: int) -> None:
    config = dataclasses.replace(row.config, warm_start_steps=warm_start_steps)
    whole = Drive(config, row, 3).begin(starts(3, 5))
    cuts = []
    for _ in range(12):
        cuts.append(whole.saved())
        whole.advance()
    for cut, (tensors, rng_states) in enumerate(cuts):
        resumed = Drive(config, row, 3).restore(tensors, rng_states)
        for _ in range(12 - cut):
            resumed.advance()
        for name, tensor in whole.state._asdict().items():
            assert torch.equal(getattr(resumed.state, name), tensor), (cut, name)


@noisy
def test_the_resume_check_catches_lost_generators(row: Row) -> None:
    whole = Drive(row.config, row, 3).begin(starts(3, 5))
    whole.advance()
    tensors, rng_states = whole.saved()
    fresh = [generator("lost", chain).get_state() for chain in range(3)]
    ends = []
    for states in (rng_states, fresh):
        resumed = Drive(row.config, row, 3).restore(tensors, states)
        for _ in range(11):
            resumed.advance()
        ends.append(resumed.state.theta)
    assert not torch.equal(*ends)


@rows
@pytest.mark.parametrize("warm_start_steps", [0, 4])
def test_updates_change_neither_the_start_nor_earlier_states(row: Row, warm_start_steps: int) -> None:
    theta = starts(3, 5)
    drive = Drive(dataclasses.replace(row.config, warm_start_steps=warm_start_steps), row, 3).begin(theta)
    for _ in range(12):
        state, (before, _) = drive.state, drive.saved()
        drive.advance()
        for name, tensor in before.items():
            assert torch.equal(getattr(state, name), tensor), name
    assert torch.equal(theta, starts(3, 5))


# ------------------------------------------------------------------------------------------------------------ law


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


# ---------------------------------------------------------------------------------------------------------- configs


def changed(row: Row) -> MethodConfig:
    return dataclasses.replace(
        row.config,
        prior="he",
        prior_std={"lora_A": 0.5, "lora_B": 2.0},
        prior_mean="initial",
        temper="likelihood",
        burn_in=30,
        thin=2,
        init_jitter=0.3,
        schedule=RobbinsMonro(offset=9.0),
        warm_start_steps=3,
        warm_start_learning_rate=0.02,
    )


@rows
def test_a_config_survives_json(row: Row) -> None:
    for config in (row.config, changed(row)):
        restored = from_dict(json.loads(json.dumps(config.to_dict())))
        assert restored == config
        assert type(restored) is type(config)


BAD = {
    "num_chains": [0, -1, 1.5, "2", True, None],
    "draws_per_chain": [0, -1, 1.5],
    "burn_in": [-1, math.nan, math.inf, "half"],
    "thin": [0, -2, 1.5],
    "prior_std": [0, -1.0, math.nan, "wide", {"lora": 0.0}],
    "prior": ["cauchy", None],
    "prior_mean": ["base", 0.0],
    "temperature": [-1.0, math.nan, math.inf, "cold", True],
    "temper": ["prior", None],
    "init_jitter": [-0.1, math.nan],
    "schedule": ["cosine", 3, {"name": "staircase"}],
    "warm_start_steps": [-1, 1.5],
    "warm_start_learning_rate": [0.0, -1e-3, math.nan],
}


@rows
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_bad_config_values_are_refused_by_field_and_value(row: Row, field: str, value: object) -> None:
    shown = re.escape(repr(next(iter(value.values())) if isinstance(value, dict) else value))
    with pytest.raises(ValueError, match=rf"{field} must be .*got {shown}"):
        from_dict({**row.config.to_dict(), field: value})


@rows
def test_configs_are_frozen_and_keyword_only(row: Row) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.config.num_chains = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        type(row.config)(4)  # type: ignore[call-arg]


@rows
def test_an_unknown_field_is_refused_with_the_fields_there_are(row: Row) -> None:
    with pytest.raises(ValueError, match=r"has no field 'num_chain': its fields are .*num_chains"):
        from_dict({**row.config.to_dict(), "num_chain": 3})


@pytest.mark.parametrize("values", [{}, {"name": "sghcm"}, {"name": None}, {"name": ["sghmc"]}])
def test_an_unknown_name_is_refused_with_the_names_there_are(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"unknown method .*the methods are {', '.join(sorted(METHODS))}"):
        from_dict(values)


def test_from_dict_adds_defaults_and_changes_no_argument() -> None:
    values = {"name": "sghmc", "momentum": 0.5}
    assert from_dict(values) == SGHMCConfig(momentum=0.5)
    assert values == {"name": "sghmc", "momentum": 0.5}


# ------------------------------------------------------------------------------------------------------------ build


def problem(**changes: Any) -> Problem:
    return Problem(N, FlatPrior(), learning_rate=0.1, num_steps=10, burn_in=5, shapes={"": (5,)})._replace(**changes)


@rows
@pytest.mark.parametrize("field", ["num_data", "learning_rate"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, None])
def test_build_refuses_problems_without_scale(row: Row, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{row.config.name}: {field} must be a finite number > 0, got"):
        build(row.config, problem(**{field: value}))


@rows
def test_a_warm_start_longer_than_burn_in_is_refused(row: Row) -> None:
    with pytest.raises(ValueError, match=r"warm_start_steps=6 count as burn-in, which is 5 of 10 updates"):
        build(dataclasses.replace(row.config, warm_start_steps=6), problem())


@cold
def test_samplers_warn_that_zero_temperature_draws_no_samples(row: Row) -> None:
    if row.law is None:  # an optimiser is at T = 0 by nature
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            build(row.config, problem())
        return
    for temper, goal in (("posterior", "posterior"), ("likelihood", "likelihood")):
        config = dataclasses.replace(row.config, temperature=0.0, temper=temper)
        with pytest.warns(UserWarning, match=f"temperature 0 maximises the {goal}: its draws are no posterior samples"):
            build(config, problem())


# -------------------------------------------------------------------- adding a method touches four places, no more


def test_every_method_has_a_row_here() -> None:
    assert list(ROWS) == list(METHODS)
    assert all(type(ROWS[name].config) is config for name, config in METHODS.items())


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_one_file_whose_config_carries_its_name(name: str) -> None:
    config = METHODS[name]
    assert config.name == name
    assert Path(inspect.getfile(config)).stem == name
    assert [other for other in METHODS.values() if inspect.getfile(other) == inspect.getfile(config)] == [config]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_row_in_the_paper_index(name: str) -> None:
    module = Path(inspect.getfile(METHODS[name])).relative_to(REPOSITORY / "hf_bayes")
    index = (REPOSITORY / "docs" / "paper_index.md").read_text(encoding="utf-8")
    lines = [line for line in index.splitlines() if line.startswith("|") and f"`{name}`" in line]
    assert any(module.as_posix() in line for line in lines), f"no row with `{name}` and {module.as_posix()}"


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_the_registry_and_other_methods_import_a_method() -> None:
    package = Path(hf_bayes.__file__).parent
    method_files = {Path(inspect.getfile(config)) for config in METHODS.values()}
    method_modules = {config.__module__ for config in METHODS.values()}
    importers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if path not in method_files and method_modules & set(imported_modules(path))
    }
    assert importers == {"__init__.py", "methods/registry.py"}  # __init__.py: public names


def test_rules_and_kernels_are_all_there_is() -> None:
    for row in ROWS.values():
        assert isinstance(build(row.config, problem()), Rule | Kernel)


@pytest.mark.statistics
def test_the_worked_example_of_the_documentation_keeps_its_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (REPOSITORY / "docs" / "add_a_method.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "shared_noise.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("shared_noise")
    row = Row(config=module.SharedNoiseConfig(), learning_rate=0.5, law=exact)
    assert_gaussian_moments(gaussian_members(row, 1.0), exact(1.0))
    with pytest.raises(AssertionError):  # SGLD's law at this step size is 1.33 times as wide
        assert_gaussian_moments(gaussian_members(dataclasses.replace(row, config=SGLDConfig()), 1.0), exact(1.0))
