from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.models.attaching import attach
from hf_bayes.models.current_members import CurrentMembers, stored_temperature, warn_of_lost_temperature
from hf_bayes.models.predictors import PredictedBy
from tests.members.reference import mixture, relative_error, separate_logits
from tests.models.prepared import prepared
from tests.tiny_models import batch, tiny_llama, with_lora


def test_shown_members_answer_in_place_of_the_parameter() -> None:
    model, layout, theta, subspace = prepared("llama-lora", num_members=4)
    with torch.no_grad(), attach(model, theta[:2], subspace=subspace) as bayesian:
        bayesian.show(theta[2:])
        found = bayesian(**batch()).logits
        assert bayesian.num_members == 2
        bayesian.show(None)
        other = bayesian(**batch()).logits
    assert relative_error(found, mixture(separate_logits(model, layout, theta[2:], batch()))) < 1e-12
    assert relative_error(other, found) > 0.01


def test_the_end_of_a_block_undoes_what_show_did_alone() -> None:
    current, (first, second, group) = CurrentMembers(), (torch.zeros(1, 2), torch.ones(1, 2), LocalMembers())
    current.show(first, group, 0.5)
    with current.restored():
        current.show(second, None, 2.0)
        # of the model's own members: a block that loads others, or predicts in another way, keeps them
        current.own_group = own = LocalMembers()
    assert current.replacement == (first, group, 0.5)
    current.show(None, None)
    assert current.group is own


def test_members_cannot_be_spread_without_launched_processes() -> None:
    with attach(with_lora(tiny_llama())) as model, pytest.raises(ValueError, match="start it with accelerate launch"):
        model.spread_members()


def storing(temperature: float, prediction: str = "members", num_members: int = 4) -> Any:
    """Return what a model reads of a posterior with this temperature of the mixture."""
    calibration = {"temperature": temperature, "prediction": prediction, "num_members": num_members}
    return SimpleNamespace(config=SimpleNamespace(calibration=calibration))


@pytest.mark.parametrize(
    ("predictions", "words"),
    [
        (PredictedBy("single_pass", 0), r"temperature of the mixture, 1.3, .*'single_pass'.*fit_calibration"),
        (PredictedBy("members", 2), "'members' with 4 members, and this model predicts by 'members' with 2"),
    ],
)
def test_a_temperature_of_other_predictions_is_left_out(predictions: PredictedBy, words: str) -> None:
    assert stored_temperature(storing(1.3), predictions) == 1
    with pytest.warns(UserWarning, match=words):
        warn_of_lost_temperature(storing(1.3), predictions)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("posterior", "expected"), [(storing(1.3), 1.3), (None, 1.0), (storing(1.0, "other"), 1.0)])
def test_nothing_is_said_where_no_temperature_is_lost(posterior: Any, expected: float) -> None:
    predictions = PredictedBy("members", 4)
    warn_of_lost_temperature(posterior, predictions)
    assert stored_temperature(posterior, predictions) == expected


def test_the_temperature_follows_what_the_model_predicts_by() -> None:
    model, _, theta, subspace = prepared("llama-lora", num_members=4)
    with attach(model, theta, subspace=subspace) as bayesian:
        bayesian.posterior = storing(1.3)
        assert bayesian.mixture_temperature == 1.3
        bayesian.calibrated = False
        assert bayesian.mixture_temperature == 1
        bayesian.calibrated = True
        bayesian.place(theta[:2])
        assert bayesian.mixture_temperature == 1
        # as spread_members leaves it: two processes have two members each
        bayesian.current_members.own_group = spread = LocalMembers()
        spread.size = 2
        assert bayesian.mixture_temperature == 1.3
        with bayesian.showing(theta, temperature=0.5):
            assert bayesian.mixture_temperature == 0.5
        assert bayesian.mixture_temperature == 1.3
