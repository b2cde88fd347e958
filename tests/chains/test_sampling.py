from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.energy_objective import EnergyObjective
from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.distributions.energy import GaussianPrior
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from tests.chains.bowl import bowl, run

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


# --------------------------------------------------------------------------------------------------------- bad input


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


@pytest.mark.parametrize("batches", [{"x": torch.ones(2)}, torch.ones(2, 3)])
def test_one_batch_in_place_of_many_is_refused(batches: Any) -> None:
    with pytest.raises(ValueError, match=r"batches must be an iterable of batches, got one (dict|Tensor): put it in"):
        seen_batches(batches)


# --------------------------------------------------------------------------------------- a prior apart from the energy


def likelihood(theta: Tensor, batch: object) -> Tensor:
    return 2 * (theta - 1).square().sum(1)  # precision 4 around 1


def moments(method: MethodConfig) -> tuple[float, float]:
    """Return mean and variance of the draws under the likelihood above and the prior N(0, 1/4)."""
    starts = torch.zeros(1024, 2)
    draws = sample(likelihood, starts, method, num_steps=40, burn_in=30, thin=5, learning_rate=0.1, prior=0.5).draws
    return float(draws.mean()), float(draws.var())


@pytest.mark.statistics
def test_a_likelihood_alone_is_tempered_where_the_prior_is_apart() -> None:
    mean, variance = moments(HMCConfig(temperature=0.5, temper="likelihood"))
    # precision 4 / T + 4 = 12, mean 8 / 12; 4 standard errors of 2048 chain elements: .026, and 13 %
    assert mean == pytest.approx(2 / 3, abs=0.026)
    assert variance == pytest.approx(1 / 12, rel=0.13)
    whole_mean, whole_variance = moments(HMCConfig(temperature=0.5))  # the broken twin: the prior is tempered, too
    assert whole_mean == pytest.approx(1 / 2, abs=0.026)
    assert whole_variance == pytest.approx(0.5 / 8, rel=0.13)


def test_a_prior_apart_is_the_prior_inside() -> None:
    def inside(theta: Tensor, batch: object) -> Tensor:
        return likelihood(theta, batch) + 0.5 * (theta / 0.5).square().sum(1)

    theta = torch.zeros(2, 3, dtype=torch.float64)
    expected = run(inside, theta=theta).draws
    for prior in (
        0.5,
        GaussianPrior(torch.tensor(0.0), torch.tensor(0.5)),
        Gaussian.diagonal(theta[:1], theta[:1] + 0.5),
    ):
        assert torch.allclose(run(likelihood, theta=theta, prior=prior).draws, expected, atol=1e-12)


def test_each_named_tensor_may_have_a_prior_of_its_own() -> None:
    def energy(theta: dict[str, Tensor], batch: object) -> Tensor:
        return 0 * (theta["a"].sum(1) + theta["b"])

    method = MAPConfig()
    theta = {"a": torch.ones(1, 2), "b": torch.ones(1)}
    info = run(energy, theta=theta, method=method, num_steps=1, prior={"b": 2.0, "a": 0.5}).info
    log_normaliser = 3 * 0.5 * math.log(2 * math.pi) + 2 * math.log(0.5) + math.log(2.0)
    assert float(info["energy"][0, 0]) == pytest.approx(2 * 0.5 * 4 + 0.5 / 4 + log_normaliser)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (0.0, "prior must be a density .* or a standard deviation > 0 .*; got 0.0"),
        ("wide", "got 'wide'"),
        ({"a": 1.0}, r"prior must name each tensor of theta once, got \['a'\]: theta is one tensor without names"),
    ],
)
def test_what_is_no_prior_is_refused(prior: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(prior=prior)


# ----------------------------------------------------------------------------------------- the noise of the gradient


def noisy_variance(**changes: Any) -> float:
    """Return the variance of draws on N(0, 1) whose gradients have noise of variance 16 a batch, 8 an update."""
    noise = torch.randn(997, generator=generator("noise"), dtype=torch.float64) * 4

    def energy(theta: Tensor, batch: Tensor) -> Tensor:
        return 0.5 * theta.square().sum(1) + (theta * batch).sum(1)

    def batches() -> Iterator[Tensor]:
        order = torch.randint(997, (800, 64, 8), generator=generator("rows"))
        yield from noise[order]

    theta = torch.randn(64, 8, generator=generator("starts"), dtype=torch.float64)
    method = SGHMCConfig(momentum=0.5, **changes)
    draws = sample(energy, theta, method, num_steps=400, learning_rate=0.05, burn_in=100, thin=10, batches=batches,
                   batches_per_step=2).draws  # fmt: skip
    return float(draws.var())


@pytest.mark.statistics
def test_the_noise_of_two_batches_is_subtracted_from_the_samplers() -> None:
    # 2 gamma h T = 2 (1 - .5) T; h^2 V = .05 * 8 = .4 of it, so the noise heats by 40 % without a correction. A draw
    # is independent of the next but one: 4 standard errors at ESS 4,000 are 9 %; discretisation adds 1 %
    assert noisy_variance(correct_gradient_noise=True) == pytest.approx(1.0, abs=0.12)
    assert noisy_variance() == pytest.approx(1.4, abs=0.15)


def test_the_measured_noise_is_the_variance_of_the_mean() -> None:
    values = torch.tensor([1.0, 5.0, 6.0])

    def energy(theta: Tensor, batch: Tensor) -> Tensor:
        return (theta * batch).sum(1)

    objective = EnergyObjective(energy, batched=True, measures_noise=True)
    found = objective.evaluate(torch.ones(2, 4), list(values))
    assert found.grad_variance is not None
    assert found.grad_variance[:, 0].tolist() == pytest.approx(2 * [float(values.var() / 3)])
    assert objective.evaluate(torch.ones(2, 4), list(values[:1])).grad_variance is None
