from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.energy_objective import EnergyObjective
from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.rng import generator
from hf_bayes.distributions.approximations import Draws, Gaussian
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
        if torch.is_grad_enabled():  # the checks of the energy call it without
            seen.append(batch)
        return bowl(theta, batch)

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


def test_it_shows_no_progress_bar_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_masses_of_one_tensor_are_warned_of() -> None:
    method = SGHMCConfig(preconditioner="layerwise", preconditioner_batches=1)
    with pytest.warns(UserWarning, match="theta is one tensor: its scale is 1, and the updates that measure it do not"):
        sample(lambda theta, batch: 0.5 * theta.square().sum(1), torch.ones(2, 3), method, num_steps=10, thin=5,
               learning_rate=0.1, num_data=1)  # fmt: skip


@pytest.mark.parametrize("batches", [{"x": torch.ones(2)}, torch.ones(2, 3)])
def test_one_batch_in_place_of_many_is_refused(batches: Any) -> None:
    with pytest.raises(ValueError, match=r"batches must be an iterable of batches, got one (dict|Tensor): put it in"):
        seen_batches(batches)


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
def test_the_noise_of_two_batches_leaves_the_samplers_noise() -> None:
    # 2 gamma h T = 2 (1 - .5) T; h^2 V = .05 * 8 = .4 of it, so the noise heats by 40 % without a correction. A draw
    # is independent of the next but one: 4 standard errors at ESS 4,000 are 9 %; discretisation adds 1 %
    assert noisy_variance(correct_gradient_noise=True) == pytest.approx(1.0, abs=0.12)
    assert noisy_variance() == pytest.approx(1.4, abs=0.15)


def test_the_measured_noise_is_the_variance_of_the_mean() -> None:
    values = torch.tensor([1.0, 5.0, 6.0])

    def energy(theta: Tensor, batch: Tensor) -> Tensor:
        return (theta * batch).sum(1)

    objective = EnergyObjective(energy, batched=True, requirements=Requirements(gradient_variance="needed"))
    found = objective.evaluate(torch.ones(2, 4), list(values))
    assert found.grad_variance is not None
    assert found.grad_variance[:, 0].tolist() == pytest.approx(2 * [float(values.var() / 3)])
    assert objective.evaluate(torch.ones(2, 4), list(values[:1])).grad_variance is None
