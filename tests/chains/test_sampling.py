from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.averaging.mc_dropout import MCDropoutConfig
from hf_bayes.methods.mcmc.gps import GPSConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig


def bowl(theta: Tensor, batch: object) -> Tensor:
    return 0.5 * theta.square().sum(1)


def run(energy: Callable[[Tensor, Any], Tensor] = bowl, **changes: Any) -> Any:
    arguments = {"theta": torch.ones(2, 3), "method": SGLDConfig(), "num_steps": 10, "learning_rate": 0.1, **changes}
    theta, method = arguments.pop("theta"), arguments.pop("method")
    return sample(energy, theta, method, **arguments)


# --------------------------------------------------------------------------------------------- draws, info, chains


@pytest.mark.parametrize(
    ("burn_in", "thin", "taken_after"),
    [(0, 1, range(1, 11)), (4, 1, range(5, 11)), (3, 3, (6, 9)), (0.5, 2, (7, 9)), (9, 1, (10,)), (0, 10, (10,))],
)
def test_draws_are_taken_after_every_thin_updates_past_burn_in(
    burn_in: float, thin: int, taken_after: range | tuple[int, ...]
) -> None:
    everything = run().draws
    draws = run(burn_in=burn_in, thin=thin).draws
    assert torch.equal(draws, everything[:, [update - 1 for update in taken_after]])


def test_approximation_holds_all_draws_ordered_by_chain() -> None:
    result = run(thin=2)
    assert isinstance(result.approximation, Draws)
    assert torch.equal(result.approximation.theta, result.draws.flatten(0, 1))
    assert result.approximation.chain.tolist() == [0] * 5 + [1] * 5


@pytest.mark.parametrize(
    "method",
    [
        MetropolisConfig(target_acceptance=None),
        HMCConfig(target_acceptance=None, step_size=1e3),
        GPSConfig(max_std=1e-3),
    ],
    ids=lambda method: method.name,
)
@pytest.mark.statistics
def test_chains_that_accept_nothing_are_warned_of(method: MethodConfig) -> None:
    def energy(theta: Tensor, batch: object) -> Tensor:  # the second chain is free to move
        return bowl(theta, batch) * torch.tensor([1e12, 0.0])

    with pytest.warns(UserWarning, match=rf"{method.name}: 1 of 2 chains \(the first is 0\) accept nothing after burn"):
        run(energy, method=method, learning_rate=1.0, burn_in=4)


def _wells(theta: Tensor, batch: None) -> Tensor:
    """Normals of unit variance at -9 and 9: no chain gets from one to the other."""
    return -torch.logaddexp(*(-0.5 * (theta - mode).square().sum(1) for mode in (-9, 9)))


@pytest.mark.statistics
def test_exact_chains_that_disagree_are_warned_of() -> None:
    def draws_from(sides: list[float]) -> None:
        starts = 9 * torch.tensor(sides)[:, None]
        sample(_wells, starts, HMCConfig(), learning_rate=0.1, num_steps=300, burn_in=100)

    with pytest.warns(UserWarning, match=r"hmc: R-hat \d.* of coordinate 0 over 4 chains .* have not converged"):
        draws_from([1.0, 1.0, -1.0, -1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draws_from([1.0, 1.0, 1.0, 1.0])


def test_variational_inference_ends_in_a_gaussian() -> None:
    result = run(method=MeanFieldConfig(), num_steps=20)
    assert isinstance(result.approximation, Gaussian)
    assert result.draws.shape == (2, 20, 3)


def test_info_has_a_row_for_every_update_also_in_burn_in() -> None:
    info = run(method=SGHMCConfig(), burn_in=6, thin=2).info
    assert set(info) == {"kinetic_temperature", "kinetic_temperature_law", "configurational_temperature"}
    assert all(values.shape == (10, 2) for values in info.values())
    assert info["kinetic_temperature_law"].unique().tolist() == pytest.approx([2 / 1.9])


def test_the_last_draw_is_the_last_state() -> None:
    result = run(method=SGHMCConfig())
    assert torch.equal(result.draws[:, -1], result.state.theta)
    assert result.state.step.tolist() == [10, 10]


def test_one_theta_is_the_centre_of_jittered_starts() -> None:
    centre = torch.tensor([30.0, 40.0])
    spread = []
    for jitter in (0.0, 0.1, 0.2):
        config = SGLDConfig(num_chains=6, init_jitter=jitter)
        draws = run(theta=centre, method=config, num_steps=1, learning_rate=1e-12).draws[:, 0]
        assert draws.shape == (6, 2)
        spread.append(draws - centre)
    assert spread[0].abs().max() < 1e-4
    assert len(spread[1].unique(dim=0)) == 6
    assert torch.allclose(spread[2], 2 * spread[1], atol=1e-4)
    assert 0.4 < spread[1].std() / (0.1 * 25 * math.sqrt(2)) < 1.6  # 12 normals: sd of their sd is 0.2


def test_a_zero_theta_is_jittered_on_the_scale_of_one_hundredth() -> None:
    config = SGLDConfig(num_chains=64, init_jitter=0.5)
    draws = run(theta=torch.zeros(64), method=config, num_steps=1, learning_rate=1e-12).draws
    assert draws.std() == pytest.approx(0.005, rel=0.05)


def test_rows_of_theta_are_the_starts_and_override_num_chains() -> None:
    with pytest.warns(UserWarning, match=r"theta has 7 rows, .* so num_chains=2 of sgld is not used"):
        assert run(theta=torch.ones(7, 3), method=SGLDConfig(num_chains=2)).draws.shape == (7, 10, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(theta=torch.ones(7, 3))
        run(theta=torch.ones(7, 3), method=SGLDConfig(num_chains=7))


def test_theta_is_not_changed_and_may_require_grad() -> None:
    theta = torch.ones(2, 3, requires_grad=True)
    result = run(theta=theta)
    assert torch.equal(theta.detach(), torch.ones(2, 3))
    assert theta.grad is None
    assert not result.draws.requires_grad


def test_the_energy_may_hold_parameters_of_its_own() -> None:
    scale = torch.nn.Parameter(torch.tensor(2.0))
    run(lambda theta, batch: scale * bowl(theta, batch))
    assert scale.grad is None


def test_it_runs_under_no_grad() -> None:
    with torch.no_grad():
        assert run().draws.isfinite().all()


# --------------------------------------------------------------------------------------------------- learning rates


def test_a_constant_schedule_is_the_number() -> None:
    assert torch.equal(run(learning_rate=lambda step: 0.1, method=SGHMCConfig()).draws, run(method=SGHMCConfig()).draws)


def test_a_schedule_starts_at_step_0_and_its_peak_sets_friction() -> None:
    asked = []

    def schedule(step: int) -> float:
        asked.append(step)
        return 0.1 / (1 + abs(step - 4))

    info = run(learning_rate=schedule, method=SGHMCConfig(momentum=0.8)).info
    assert asked == list(range(10))
    # beta_t = 1 - 0.2 sqrt(l_t / peak)
    decay = [1 - 0.2 * math.sqrt(1 / (1 + abs(step - 4))) for step in range(10)]
    assert info["kinetic_temperature_law"][:, 0].tolist() == pytest.approx([2 / (1 + b) for b in decay], rel=1e-6)


@pytest.mark.parametrize("bad", [0.0, -0.1, math.nan, math.inf, None])
def test_a_schedule_value_that_is_not_positive_is_refused(bad: object) -> None:
    calls = []

    def energy(theta: Tensor, batch: object) -> Tensor:
        calls.append(1)
        return bowl(theta, batch)

    with pytest.raises(ValueError, match=r"learning_rate must be > 0 at every step, the schedule gives .* at step 7 "):
        run(energy, learning_rate=lambda step: bad if step == 7 else 0.1)
    assert not calls  # before the first update


# ---------------------------------------------------------------------------------------------------- bad energies


def coupled(theta: Tensor, batch: object) -> Tensor:
    """The sum over chains, returned to each."""
    return 0.5 * theta.square().sum().expand(len(theta))


def follower(theta: Tensor, batch: object) -> Tensor:
    """Chain 0 alone depends on another chain."""
    return bowl(theta, batch) + torch.eye(len(theta))[0].to(theta) * theta[1].sum()


@pytest.mark.parametrize("energy", [coupled, follower])
@pytest.mark.parametrize("method", [HMCConfig(), MetropolisConfig(), SGLDConfig()], ids=lambda method: method.name)
@pytest.mark.parametrize("start", [torch.zeros(2, 3), torch.randn(5, 3, generator=generator("start"))])
def test_chains_that_depend_on_each_other_are_refused(
    energy: Callable[..., Tensor], method: MethodConfig, start: Tensor
) -> None:
    run(theta=start, method=method, num_steps=40, burn_in=20)
    with pytest.raises(ValueError, match=r"treat chains independently, .* for chain \d when only other chains move"):
        run(energy, theta=start, method=method, num_steps=40, burn_in=20)


@pytest.mark.parametrize("noise", [1e-4, 10.0])
def test_noise_of_an_energy_is_not_taken_for_coupling(noise: float) -> None:
    rng = generator("noise")

    def noisy(theta: Tensor, batch: object) -> Tensor:
        return bowl(theta, batch) + noise * torch.randn(len(theta), generator=rng)

    run(noisy, theta=torch.randn(8, 3, generator=generator("start")), num_steps=20)


def sums_in_another_order(theta: Tensor, batch: object) -> Tensor:
    """float32's rounding of 10,000 terms near 1e7 depends on who is the largest."""
    terms = 1e3 * (1 + 1e-3 * theta[:, :1] * torch.linspace(-1, 1, 10_000)).square()
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(int(theta.abs().sum() * 1e6)))
    return terms[:, order].cumsum(1)[:, -1]


def test_rounding_that_depends_on_other_chains_is_no_coupling() -> None:
    theta = torch.randn(6, 1, generator=generator("start"))
    sums_in_another_order(theta, None)
    run(sums_in_another_order, theta=theta, num_steps=3, learning_rate=1e-9)


@pytest.mark.parametrize(
    "write",
    [
        lambda theta: theta.add_(1),
        lambda theta: theta.__setitem__((slice(None), 0), 0.0),
        lambda theta: theta.data.mul_(2),
    ],
    ids=["add_", "setitem", "data"],
)
@pytest.mark.parametrize("method", [SGLDConfig(), MetropolisConfig(), HMCConfig()], ids=lambda method: method.name)
def test_an_energy_that_writes_into_theta_is_refused(write: Callable[[Tensor], Any], method: MethodConfig) -> None:
    def energy(theta: Tensor, batch: object) -> Tensor:
        write(theta)
        return bowl(theta, batch)

    with pytest.raises(ValueError, match=r"energy must not change theta, .* got an energy that writes into it"):
        run(energy, method=method)


def failing_cholesky(theta: Tensor, batch: object) -> Tensor:
    """theta ~ N(0, 1) where [[1, theta], [theta, 1]] is positive definite; two other coordinates of no consequence."""
    off = theta[:, 0, None, None] * torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    factor = torch.linalg.cholesky(torch.eye(2) + off)
    return bowl(theta, batch) + 0 * factor.sum((1, 2))


def failing_constraint(theta: Tensor, batch: object) -> Tensor:
    """theta ~ N(0, 1) on (-1, 1), by the constraint of a scale."""
    scale = 1 - theta[:, 0].square()
    return bowl(theta, batch) + 0 * torch.distributions.Normal(0.0, scale, validate_args=True).log_prob(
        torch.tensor(0.0)
    )


def answering_nan(theta: Tensor, batch: object) -> Tensor:
    return torch.where(theta[:, 0].abs() < 1, bowl(theta, batch), torch.nan)


@pytest.mark.parametrize("raising", [failing_cholesky, failing_constraint])
@pytest.mark.parametrize(
    "method", [HMCConfig(step_size=0.7, num_leapfrog=3), MetropolisConfig(), GPSConfig(max_std=1.0)],
    ids=lambda method: method.name,
)  # fmt: skip
def test_an_energy_that_raises_rejects_one_chain_as_nan_does(
    raising: Callable[..., Tensor], method: MethodConfig
) -> None:
    options: dict[str, Any] = {"theta": 0.1 * torch.ones(5, 3), "method": method, "num_steps": 60, "burn_in": 20}
    with pytest.warns(UserWarning, match=r"the energy raised an exception in \d+ of 300 moves, which were rejected"):
        found = run(raising, **options)
    expected = run(answering_nan, **options)
    assert torch.equal(found.draws, expected.draws)
    raised = found.info["energy_raised"]
    assert torch.equal(raised, found.info["divergent"])
    assert 0 < raised.mean() < 0.9
    assert not expected.info["energy_raised"].any()


def test_an_energy_that_raises_where_chains_start_is_an_error() -> None:
    theta = torch.tensor([[0.5], [3.0], [-0.5], [2.0]])
    with pytest.raises(FloatingPointError, match=r"energy raised _?LinAlgError .* at the start of chains \[1, 3\]"):
        run(failing_cholesky, theta=theta, method=HMCConfig())
    with pytest.raises(torch.linalg.LinAlgError):  # a rule moves on from every theta, and can reject none
        run(failing_cholesky, theta=theta)


@pytest.mark.parametrize("error", [TypeError, NameError, RuntimeError, ValueError, KeyError, torch.OutOfMemoryError])
def test_errors_of_the_program_end_the_run(error: type[Exception]) -> None:
    calls = itertools.count()

    def energy(theta: Tensor, batch: object) -> Tensor:
        if next(calls) > 20:
            raise error("a mistake")
        return bowl(theta, batch)

    with pytest.raises(error, match="a mistake"):
        run(energy, method=HMCConfig())


# ----------------------------------------------------------------------------------------------------------- batches


def seen_batches(batches: Any, *, num_steps: int = 7, method: MethodConfig | None = None) -> list[Any]:
    """The batch of each evaluation."""
    seen: list[Any] = []

    def energy(theta: Tensor, batch: Any) -> Tensor:
        seen.append(batch)
        return bowl(theta, batch)

    # one chain: of several the energy is evaluated some more times, to see that it treats them independently
    run(energy, theta=torch.ones(1, 3), batches=batches, num_steps=num_steps, method=method or SGLDConfig())
    return seen


def test_batches_are_cycled_over_one_per_update() -> None:
    expected = [1, 2, 3, 1, 2, 3, 1]
    assert seen_batches([1, 2, 3]) == expected
    assert seen_batches(lambda: iter([1, 2, 3])) == expected
    assert seen_batches(itertools.count(), num_steps=4) == [0, 1, 2, 3]
    assert seen_batches(None) == [None] * 7


def test_energies_of_several_batches_per_step_are_averaged() -> None:
    def energy(theta: Tensor, batch: float | None) -> Tensor:
        return theta.square().sum(1) if batch is None else batch * theta.square().sum(1)

    theta = torch.ones(3, 2, dtype=torch.float64)
    common: dict[str, Any] = {"num_steps": 4, "learning_rate": 0.1, "progress": False}
    whole = sample(energy, theta, SGLDConfig(), **common)
    parts = sample(energy, theta, SGLDConfig(), batches=[0.5, 1.5, 0.0, 2.0], batches_per_step=2, **common)
    torch.testing.assert_close(parts.draws, whole.draws, rtol=1e-14, atol=0)
    single = sample(energy, theta, SGLDConfig(), batches=[0.5, 1.5, 0.0, 2.0], **common)
    assert (single.draws - whole.draws).abs().max() > 0.01


def test_a_data_loader_is_shuffled_anew_in_each_pass() -> None:
    shuffle = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.arange(32), batch_size=16, shuffle=True, generator=shuffle)  # type: ignore[arg-type, var-annotated]
    seen = torch.cat(seen_batches(loader, num_steps=4)).view(2, 32)
    assert torch.equal(seen.sort(1).values, torch.arange(32).expand(2, -1))
    assert not torch.equal(seen[0], seen[1])


def test_a_generator_that_runs_out_is_refused_with_what_to_pass() -> None:
    def once() -> Iterator[int]:
        yield from (1, 2, 3)

    assert seen_batches(once(), num_steps=3) == [1, 2, 3]
    with pytest.raises(ValueError, match=r"could be read only 1 time\(s\).*a list, a DataLoader, or a function"):
        seen_batches(once(), num_steps=4)


@pytest.mark.parametrize("batches", [[], lambda: iter(())])
def test_empty_batches_are_refused(batches: Any) -> None:
    with pytest.raises(ValueError, match="batches is empty"):
        seen_batches(batches)


@pytest.mark.parametrize("batches", [{"x": torch.ones(2)}, torch.ones(2, 3)])
def test_one_batch_in_place_of_many_is_refused(batches: Any) -> None:
    with pytest.raises(ValueError, match=r"batches must be an iterable of batches, got one (dict|Tensor): put it in"):
        seen_batches(batches)


@pytest.mark.parametrize("method", [MetropolisConfig(), HMCConfig()])
def test_exact_kernels_refuse_batches(method: MethodConfig) -> None:
    with pytest.raises(ValueError, match=rf"{method.name} is exact only if every energy sees all data, got batches"):
        run(batches=[1, 2], method=method)


@pytest.mark.statistics
def test_unbiased_batches_with_small_steps_give_the_posterior() -> None:
    rows, order = torch.randn(64, generator=generator("rows"), dtype=torch.float64), generator("order")

    def energy(theta: Tensor, batch: Tensor) -> Tensor:
        return 64 * 0.5 * (theta - batch).square().mean(1)  # theta [M, 1], batch [8]

    draws = sample(
        energy,
        rows.mean().expand(256, 1),
        SGLDConfig(),
        num_steps=2000,
        learning_rate=0.02,
        num_data=64,
        batches=lambda: iter(rows[torch.randperm(64, generator=order)].view(8, 8)),
        burn_in=200,
    ).draws
    # batches add at most l Var(row) / 16 = 0.1 % to T; 4 standard errors at ESS 4000 are 9 %
    assert draws.var() * 64 == pytest.approx(1.0, abs=0.09)
    assert (draws.mean() - rows.mean()).abs() * 8 < 0.07


# -------------------------------------------------------------------------------------------------------- non-finite


@pytest.mark.parametrize("method", [SGLDConfig(), SGHMCConfig(), MAPConfig(), MeanFieldConfig()])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_energy_stops_and_names_update_and_chain(method: MethodConfig, bad: float) -> None:
    calls = itertools.count()

    def energy(theta: Tensor, batch: object) -> Tensor:
        poison = torch.tensor([0.0, bad, 0.0]) if next(calls) == 5 else torch.zeros(3)
        return bowl(theta, batch) + poison

    with pytest.raises(FloatingPointError, match=r"non-finite energy at update 6 \(chain 1\)"):
        run(energy, theta=torch.ones(3, 2), method=method, burn_in=8)  # no other evaluation before the first draw


def test_a_non_finite_gradient_of_a_finite_energy_stops_the_run() -> None:
    def energy(theta: Tensor, batch: object) -> Tensor:
        return theta.abs().sqrt().sum(1)  # infinite slope at 0

    theta = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    with pytest.raises(FloatingPointError, match=r"non-finite gradient of the energy at update 1 \(chains 1, 2\)"):
        run(energy, theta=theta)


def test_huge_but_finite_energies_go_on() -> None:
    def energy(theta: Tensor, batch: object) -> Tensor:
        return 3e38 + 0 * theta.sum(1)  # the sum over two chains overflows float32

    assert run(energy).draws.isfinite().all()


@pytest.mark.parametrize("method", [MetropolisConfig(), HMCConfig()])
def test_kernels_start_inside_the_support_and_never_leave_it(method: MethodConfig) -> None:
    def half_normal(theta: Tensor, batch: object) -> Tensor:
        return torch.where((theta > 0).all(1), bowl(theta, batch), torch.inf)

    draws = run(half_normal, method=method, num_steps=200).draws
    assert (draws > 0).all()
    with pytest.raises(FloatingPointError, match=r"non-finite energy at update 1 \(chain 0\)"):
        run(half_normal, method=method, theta=torch.tensor([[-1.0], [1.0]]))


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "sgld"}, r"method must be a config such as SGHMCConfig\(...\), got 'sgld'"),
        ({"method": SGLDConfig}, r"method must be a config such as SGHMCConfig\(...\), got <class"),
        ({"method": SGLDConfig(prior_std=2.0)}, r"sample adds no prior, but sgld sets prior_std=2.0: put -log p"),
        ({"method": SGLDConfig(prior_std={".*": 1.0})}, r"sample adds no prior, but sgld sets prior_std={'"),
        ({"method": SGLDConfig(prior="laplace")}, r"sample adds no prior, but sgld sets prior='laplace'"),
        ({"method": SGLDConfig(prior_mean="initial")}, r"sample adds no prior, but sgld sets prior_mean='initial'"),
        ({"method": SGLDConfig(temper="likelihood")}, r"got temper='likelihood', expected 'posterior'"),
        ({"method": SGLDConfig(burn_in=5)}, r"would ignore burn_in=5 of sgld: leave it out of the config"),
        ({"method": SGLDConfig(thin=5)}, r"would ignore thin=5 of sgld"),
        ({"method": SGLDConfig(draws_per_chain=5)}, r"would ignore draws_per_chain=5 of sgld"),
        (
            {"method": MCDropoutConfig(targets="q_proj")},
            r"one tensor without a name, but mc_dropout sets targets='q_proj', .* leave it out, or use Bayes",
        ),
        ({"method": SGLDConfig(warm_start_steps=3)}, r"warm_start_steps=3 count as burn-in, which is 0 of 10 updates"),
        ({"num_steps": 0}, r"num_steps must be an integer >= 1, got 0"),
        ({"num_steps": 10.0}, r"num_steps must be an integer >= 1, got 10.0"),
        ({"learning_rate": 0.0}, r"learning_rate must be a finite number > 0, got 0.0"),
        ({"learning_rate": -1}, r"learning_rate must be a finite number > 0, got -1"),
        ({"learning_rate": "0.1"}, r"learning_rate must be a finite number > 0, got '0.1'"),
        ({"num_data": 0}, r"num_data must be a finite number > 0, got 0"),
        ({"num_data": math.nan}, r"num_data must be a finite number > 0, got nan"),
        ({"burn_in": -1}, r"burn_in must be a fraction in \[0, 1\) or a number of updates, got -1"),
        ({"burn_in": 2.5}, r"burn_in must be a fraction .*, got 2.5"),
        ({"burn_in": math.nan}, r"burn_in must be a fraction .*, got nan"),
        ({"burn_in": math.inf}, r"burn_in must be a fraction .*, got inf"),
        ({"burn_in": 10}, r"would collect 0 draws: 10 updates, the first 10 of them burn-in"),
        ({"thin": 11}, r"would collect 0 draws: 10 updates, .* one draw per 11"),
        ({"thin": 0}, r"thin must be an integer >= 1, got 0"),
        ({"seed": None}, r"seed must be an integer, got None"),
        ({"seed": 0.5}, r"seed must be an integer, got 0.5"),
        ({"batches": 3}, r"batches must be an iterable of batches or a function that returns one, got 3"),
        ({"batches": lambda: None}, r"a function that returns one, got a function that returned None"),
        ({"theta": [[1.0, 2.0]]}, r"theta must be a tensor \[M, d\] or \[d\], got list"),
        ({"theta": torch.ones(2, 3, 4)}, r"theta must be \[M, d\] or \[d\] .*, got shape \[2, 3, 4\]"),
        ({"theta": torch.ones(0, 3)}, r"theta must be \[M, d\] or \[d\] .*, got shape \[0, 3\]"),
        ({"theta": torch.ones(2, 3, dtype=torch.bfloat16)}, r"theta must be float32 or float64, got torch.bfloat16"),
        ({"theta": torch.ones(2, 3, dtype=torch.int64)}, r"theta must be float32 or float64, got torch.int64"),
        ({"theta": torch.tensor([[1.0, math.nan]])}, r"theta has non-finite elements"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_update(changes: dict[str, Any], message: str) -> None:
    calls = []

    def energy(theta: Tensor, batch: object) -> Tensor:
        calls.append(1)
        return bowl(theta, batch)

    with pytest.raises(ValueError, match=message):
        run(energy, **changes)
    assert not calls


@pytest.mark.parametrize(
    ("energy", "message"),
    [
        (
            lambda theta, batch: theta.square().sum(),
            r"tensor of shape \[2\] for theta \[2, 3\]; got \[\] of .*: sum over",
        ),
        (lambda theta, batch: theta.square(), r"tensor of shape \[2\] for theta \[2, 3\]; got \[2, 3\] of"),
        (None, r"energy must be a function of \(theta, batch\), got None"),
        (lambda theta, batch: theta.sum(1).long(), r"one real number per chain, a floating-point .* of torch.int64"),
        (
            lambda theta, batch: torch.ones(2, requires_grad=True),
            r"energy must depend on theta: .* a gradient, but of other tensors only",
        ),
        (
            lambda theta: bowl(theta, None),
            r"energy\(theta, batch\), .* a function of \(theta\) \(too many",
        ),
        (lambda theta, batch: 1.0, r"one real number per chain, .* got float"),
        (lambda theta, batch: bowl(theta.detach(), batch), r"energy must be differentiable in theta"),
    ],
)
def test_energies_of_the_wrong_kind_are_refused(energy: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(energy)


def test_it_shows_no_progress_bar_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


# ------------------------------------------------------------------------------------ logistic regression against HMC

INPUTS = torch.randn(200, 3, generator=generator("inputs"))
LABELS = (torch.rand(200, generator=generator("labels")) < (INPUTS @ torch.tensor([1.0, -2.0, 0.5])).sigmoid()).float()


def logistic(labels: Tensor) -> Callable[[Tensor, object], Tensor]:
    """The energy of 200 rows and 3 weights under the prior N(0, 1)."""

    def energy(theta: Tensor, batch: object) -> Tensor:
        logits = theta @ INPUTS.T
        log_lik = (labels * logits - torch.nn.functional.softplus(logits)).sum(1)
        return -log_lik + 0.5 * theta.square().sum(1)

    return energy


@pytest.fixture(scope="module")
def reference() -> Tensor:
    """[3, 2]: posterior mean and standard deviation by long HMC."""
    run_length = {"num_steps": 1000, "burn_in": 200}
    draws = sample(logistic(LABELS), torch.zeros(64, 3), HMCConfig(), learning_rate=0.1, seed=1, **run_length).draws
    return torch.stack([draws.mean((0, 1)), draws.flatten(0, 1).std(0)], 1)


def errors(config: MethodConfig, reference: Tensor, labels: Tensor = LABELS) -> tuple[float, float]:
    """The largest error of a mean in standard deviations, and of a standard deviation relative to itself."""
    draws = sample(
        logistic(labels),
        torch.zeros(256, 3),
        config,
        num_steps=2500,
        learning_rate=0.1,
        num_data=200,
        burn_in=500,
        thin=5,
    ).draws.flatten(0, 1)
    mean, std = reference.unbind(1)
    return ((draws.mean(0) - mean) / std).abs().max().item(), (draws.std(0) / std - 1).abs().max().item()


# l * lambda_max is 0.02: a bias of 0.3 % of a standard deviation. SGLD forgets the flattest direction in 150 updates:
# at ESS 1750, 4 standard errors of a mean are 0.096 standard deviations, of a standard deviation 6.8 % of it.
MEAN_TOLERANCE, STD_TOLERANCE = 0.096, 0.068


@pytest.mark.parametrize("config", [SGHMCConfig(), SGLDConfig()], ids=["sghmc", "sgld"])
@pytest.mark.statistics
def test_posterior_of_a_logistic_regression_agrees_with_long_hmc(config: MethodConfig, reference: Tensor) -> None:
    mean_error, std_error = errors(config, reference)
    assert mean_error < MEAN_TOLERANCE
    assert std_error < STD_TOLERANCE


@pytest.mark.statistics
def test_the_hmc_comparison_catches_wrong_temperature_and_data(reference: Tensor) -> None:
    assert errors(SGHMCConfig(temperature=0.8), reference)[1] > STD_TOLERANCE
    spoilt = torch.cat([torch.zeros(20), LABELS[20:]])
    assert errors(SGHMCConfig(), reference, spoilt)[0] > MEAN_TOLERANCE


def test_masses_of_one_tensor_are_warned_of() -> None:
    method = SGHMCConfig(preconditioner="layerwise", preconditioner_batches=1)
    with pytest.warns(UserWarning, match="theta is one tensor: its scale is 1, and the updates that measure it do not"):
        sample(lambda theta, batch: 0.5 * theta.square().sum(1), torch.ones(2, 3), method, num_steps=10, thin=5,
               learning_rate=0.1, num_data=1)  # fmt: skip
