"""Numbers that are not finite: the error of a run, and the chains that a trial leaves out."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.finite import NotFiniteError, not_finite, place_of, put_back, rows_not_finite
from hf_bayes.chains.run import Run
from hf_bayes.core.types import Evaluation
from hf_bayes.methods.assembly import assemble
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests.chains.normal_objective import CHAINS, NormalObjective, OfUpdate, normal_run


class Spoilt(NormalObjective):
    """The gradient of some chains is not finite in one update."""

    def __init__(self, at: dict[int, list[int]]) -> None:
        super().__init__()
        self.at = at

    def for_update(self, batches: list[Any], *, step: int, inside: Tensor | None = None) -> Any:
        return SpoiltUpdate(self, batches, self.at.get(step, []))


class SpoiltUpdate(OfUpdate):
    def __init__(self, objective: Any, batches: list[Any], chains: list[int]) -> None:
        super().__init__(objective, len(batches))
        self.chains = chains

    def __call__(self, theta: Tensor, **options: Any) -> Evaluation:
        found = super().__call__(theta, **options)
        assert found.grad_log_lik is not None
        return found._replace(
            grad_log_lik=found.grad_log_lik.index_fill(0, torch.tensor(self.chains).long(), torch.nan)
        )


def spoilt_run(at: dict[int, list[int]], config: Any) -> Run[Any]:
    like = normal_run(config)
    method = assemble(config, like.problem)
    return Run(method, Spoilt(at), like.theta.clone(), like.rngs, like.problem, leaves_out_lost=True)


@pytest.mark.parametrize("config", [MAPConfig(), SGHMCConfig()], ids=lambda config: config.name)
def test_a_lost_chain_goes_back_to_its_start(config: Any) -> None:
    run, whole = spoilt_run({1: [2]}, config), normal_run(config)
    for step in range(4):
        record, other = run.update([None], 0.01), whole.update([None], 0.01)
        assert record.lost is not None
        assert record.lost.tolist() == [step >= 1 and chain == 2 for chain in range(CHAINS)]
        assert torch.equal(record.theta[:2], other.theta[:2])  # the others do not notice
        assert record.theta.isfinite().all()
        if step >= 1:
            assert torch.equal(record.theta[2], run._start[2])


def test_a_run_ends_with_its_last_chain() -> None:
    run = spoilt_run({1: [2], 3: [0, 1]}, MAPConfig())
    for _ in range(3):
        run.update([None], 0.01)
    with pytest.raises(NotFiniteError, match=r"at step 4 \(chains 0, 1, weight\)") as error:
        run.update([None], 0.01)
    assert (error.value.step, error.value.place) == (4, ", weight")
    assert "gradient" in error.value.what


def test_other_runs_leave_out_no_chain() -> None:
    record = normal_run(MAPConfig()).update([None], 0.01)
    assert record.lost is None


def test_chains_and_places_are_those_of_the_numbers() -> None:
    value = torch.zeros(3, 2, 4)
    value[1, 0, 3], value[1, 1, 2], value[2, 1, 1] = torch.nan, torch.inf, -torch.inf
    assert rows_not_finite(value).tolist() == [False, True, True]
    assert rows_not_finite(value[:, 0, 3]).tolist() == [False, True, False]
    objective = NormalObjective()
    objective.place_of = lambda column: f", column {column}"  # type: ignore[method-assign]
    assert place_of(value, 1, objective) == ", column 2"


class OfTwo(NamedTuple):
    theta: Tensor
    step: Tensor


def test_only_the_rows_are_put_back() -> None:
    before, state = OfTwo(torch.ones(3, 2), torch.ones(3)), OfTwo(torch.ones(3, 2), torch.ones(3))
    state = state._replace(step=before.step)  # an update may keep a tensor
    found = put_back(before, state, OfTwo(torch.zeros(1, 2), torch.zeros(1)), [1])
    assert found.theta.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert found.step.tolist() == [1, 0, 1]
    assert before.step.tolist() == [1, 1, 1]


def test_an_error_crosses_processes() -> None:
    error = not_finite("energy", 4, [0, 2], ", weight", NormalObjective.words)
    found = pickle.loads(pickle.dumps(error))
    assert str(found) == str(error) == "non-finite energy at step 4 (chains 0, 2, weight): stop"
    assert vars(found) == vars(error) == {"what": "energy", "step": 4, "place": ", weight"}


def test_a_kernel_leaves_out_no_chain() -> None:
    like = normal_run(HMCConfig())
    with pytest.raises(ValueError, match="leaves_out_lost=True needs a method with one gradient per update"):
        Run(like.method, like.objective, like.theta, like.rngs, like.problem, leaves_out_lost=True)
