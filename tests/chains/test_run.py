from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.run import NOISE_PERIOD, Run
from hf_bayes.core.types import Evaluation, Kernel
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.registry import METHODS
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from tests.chains.normal_objective import CHAINS, OfUpdate, normal_run


class UniformPrior(FlatPrior):
    """Uniform on [-1, 1] in every coordinate."""

    def log_prob(self, theta: Tensor) -> Tensor:
        return torch.where((theta.abs() <= 1).all(1), 0.0, -torch.inf)


def state(run: Run) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.state._asdict().items()}


def test_a_rule_locates_once_an_update_whatever_its_batches() -> None:
    one, four = normal_run(MeanFieldConfig()), normal_run(MeanFieldConfig())
    for _ in range(3):
        one.update([None], 0.01)
        four.update([None] * 4, 0.01)
    for a, b in zip(one.rngs, four.rngs, strict=True):
        assert torch.equal(a.get_state(), b.get_state())
    for name, value in state(one).items():
        torch.testing.assert_close(value, state(four)[name])


def test_theta_is_the_state_and_not_where_the_gradient_was() -> None:
    run = normal_run(MeanFieldConfig())
    run.update([None], 0.01)
    assert torch.equal(run.theta, run.state.theta)
    assert not torch.equal(run.theta, run.objective.last_theta)  # a draw from q


def test_draws_are_taken_at_their_steps_and_stay() -> None:
    run, seen = normal_run(SGHMCConfig()), []
    for _ in range(5):
        run.update([None], 0.01)
        seen.append(run.theta.clone())
    assert len(run.draws) == 2
    assert torch.equal(run.draws[0], seen[2])
    assert torch.equal(run.draws[1], seen[4])


def test_zero_learning_rate_moves_nothing_a_negative_one_raises() -> None:
    run = normal_run(SGHMCConfig())
    before = run.theta.clone()
    assert not run.update([None], 0.0).moved
    assert torch.equal(run.theta, before)
    for learning_rate in (-1e-3, float("nan"), float("inf"), None):
        with pytest.raises(ValueError, match="learning rate of step 2 is"):
            run.update([None], learning_rate)


def test_a_record_holds_the_update_and_does_not_change() -> None:
    run = normal_run(SGHMCConfig())
    start = run.theta.clone()
    record = run.update([None], 0.01)
    kept = record.theta.clone()
    run.update([None], 0.01)
    assert record.step == 1
    assert record.moved
    assert torch.equal(record.before, start)
    assert torch.equal(record.theta, kept)
    assert torch.allclose(record.loss, 0.5 * start.double().square().sum(1))


def test_a_refused_proposal_keeps_the_loss_of_its_chain() -> None:
    run = normal_run(METHODS["metropolis"](proposal_std=1e3, target_acceptance=None))
    losses = [run.update([None]).loss for _ in range(3)]
    assert torch.equal(losses[0], losses[2])
    assert torch.allclose(losses[0], 0.5 * run.theta.double().square().sum(1))


@pytest.mark.parametrize("warm_start_steps", [0, 2])
@pytest.mark.parametrize("name", METHODS, ids=str)
@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_chains_go_on_bitwise_from_their_tensors(name: str, warm_start_steps: int, cut: int) -> None:
    own = {
        "snapshot": {"schedule": None},  # five updates leave no room for cycles
        "mc_dropout": {"targets": "weight"},
        "blob": {"points": "bias"},
    }
    config = METHODS[name](num_chains=CHAINS, warm_start_steps=warm_start_steps, **own.get(name, {}))
    whole, losses = normal_run(config), []
    for step in range(5):
        if step == cut:
            saved = {name: value.clone() for name, value in whole.state_dict().items()}
        losses.append(whole.update([None] * 4, 0.01).loss)
    resumed = normal_run(config, seed=7)  # generators come from the tensors
    resumed.load_state_dict(saved, cut)
    for step in range(cut, 5):
        assert torch.equal(resumed.update([None] * 4, 0.01).loss, losses[step])
    assert all(torch.equal(value, state(whole)[name]) for name, value in state(resumed).items())
    assert all(torch.equal(a, b) for a, b in zip(resumed.draws, whole.draws, strict=True))
    assert all(torch.equal(a.get_state(), b.get_state()) for a, b in zip(resumed.rngs, whole.rngs, strict=True))


def test_tensors_of_another_method_are_refused() -> None:
    whole = normal_run(SGHMCConfig())
    whole.update([None], 0.01)
    with pytest.raises(ValueError, match="written by another method"):
        normal_run(MAPConfig()).load_state_dict(whole.state_dict(), 1)


def test_the_sum_of_large_finite_numbers_is_no_alarm() -> None:
    run = normal_run(MAPConfig())
    huge = torch.full_like(run.theta, 1e38)
    assert not huge.sum().isfinite()
    run._require_finite({"gradient": huge})
    huge[1, 13] = torch.inf
    with pytest.raises(FloatingPointError, match=r"non-finite gradient at step 1 \(chain 1, bias\): stop"):
        run._require_finite({"gradient": huge})


def test_rows_are_split_from_the_end_of_burn_in_and_at_the_end() -> None:
    run = normal_run(SGHMCConfig())
    assert not run._splits_rows
    run._watch_noise, run.problem = True, run.problem._replace(burn_in=2, draw_steps=range(250, 251))
    found = []
    for step in range(250):
        run.num_updates = step
        found += [step] if run._splits_rows else []
    assert found == [2, 2 + NOISE_PERIOD, 2 + 2 * NOISE_PERIOD, 249]


BAD_STARTS = {
    "log-likelihood": lambda found, bad: found._replace(log_lik=found.log_lik.clone().index_fill_(0, bad, torch.nan)),
    "gradient of the log-likelihood": lambda found, bad: found._replace(
        grad_log_lik=found.grad_log_lik.clone().index_fill_(0, bad, torch.inf)
    ),
}


@pytest.mark.parametrize("what", BAD_STARTS)
def test_a_bad_start_of_a_kernel_names_the_chain_of_the_run(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chains of a later process: its second row is chain 4 of the run."""
    evaluate = OfUpdate.__call__

    def spoiled(self: OfUpdate, *args: Any, **options: Any) -> Evaluation:
        return BAD_STARTS[what](evaluate(self, *args, **options), torch.tensor([1]))

    monkeypatch.setattr(OfUpdate, "__call__", spoiled)
    run = normal_run(HMCConfig(num_chains=CHAINS))
    run.chains = range(3, 3 + CHAINS)
    with pytest.raises(
        FloatingPointError, match=rf"non-finite {what} at step 1 \(chain 4.*\): chains must start where"
    ):
        run.update([None])
    assert run.state is None


def test_a_kernel_does_not_start_outside_its_prior() -> None:
    run = normal_run(METHODS["penalty"](num_chains=CHAINS))
    run.problem = run.problem._replace(prior=UniformPrior())
    run._start[2, 0] = 2.0
    with pytest.raises(FloatingPointError, match=r"non-finite log-prior at step 1 \(chain 2\): chains must start"):
        run.update([None] * 4)


def test_the_search_for_a_step_size_leaves_no_loss() -> None:
    """AdamW takes two steps, and HMC searches its first step size before the third update."""
    run = normal_run(METHODS["hmc"](warm_start_steps=2, num_leapfrog=1), draw_steps=range(5, 6), burn_in=4)
    for _ in range(2):
        record = run.update([None])
        torch.testing.assert_close(record.loss.float(), 0.5 * record.before.square().sum(1))
    for _ in range(3):
        loss = run.update([None]).loss
        torch.testing.assert_close(loss.float(), 0.5 * run.theta.square().sum(1))


def test_a_kernel_has_no_learning_rate() -> None:
    run = normal_run(HMCConfig(num_chains=CHAINS))
    assert isinstance(run.method, Kernel)
    assert run.update([None], 0.01).learning_rate is None


def test_a_result_before_the_first_draw_changes_nothing() -> None:
    run, other = normal_run(SGHMCConfig()), normal_run(SGHMCConfig())
    run.update([None], 0.01)
    other.update([None], 0.01)
    early = run.finish().approximation
    assert torch.equal(early.theta.flatten(0, -2), run.theta)
    assert run.draws == []
    for _ in range(4):
        run.update([None], 0.01)
        other.update([None], 0.01)
    assert torch.equal(run.finish().approximation.theta, other.finish().approximation.theta)


def test_draws_have_the_numbers_of_their_chains_in_all_processes() -> None:
    run = normal_run(SGHMCConfig())
    run.chains = range(3, 3 + CHAINS)
    run.update([None], 0.01)
    found = run.finish(lambda value: torch.cat([value, value])).approximation
    assert found.chain.tolist() == list(range(3, 3 + CHAINS))


def test_a_gaussian_is_made_of_the_states_of_all_chains() -> None:
    run = normal_run(MeanFieldConfig())
    run.update([None], 0.01)
    alone = run.finish().approximation
    both = run.finish(lambda value: torch.cat([value, value])).approximation
    assert len(alone.means) == CHAINS
    assert torch.equal(both.means, torch.cat([alone.means, alone.means]))


@pytest.mark.parametrize("method", [SGHMCConfig(), HMCConfig(), MAPConfig()], ids=lambda method: method.name)
def test_a_run_without_an_update_has_no_result(method: Any) -> None:
    with pytest.raises(ValueError, match="the run has no update yet"):
        normal_run(method).finish()
