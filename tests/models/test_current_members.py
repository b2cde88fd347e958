from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.models.attaching import attach
from hf_bayes.models.current_members import CurrentMembers, stored_temperature
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
        current.own_group, current.own_temperature = own = LocalMembers(), 1.3
    assert (current.shown is first, current.group is group, current.temperature) == (True, True, 0.5)
    current.show(None, None)
    assert (current.group, current.temperature) == own


def test_members_cannot_be_spread_without_launched_processes() -> None:
    with attach(with_lora(tiny_llama())) as model, pytest.raises(ValueError, match="start it with accelerate launch"):
        model.spread_members()


FITTED = {"temperature": 1.3, "prediction": "members", "num_members": 4}


def test_a_temperature_of_other_predictions_is_left_out() -> None:
    with pytest.warns(UserWarning, match=r"temperature of the mixture, 1.3, .*'single_pass'.*fit_calibration"):
        assert stored_temperature(FITTED, "single_pass", 0) == 1
    with pytest.warns(UserWarning, match="'members' with 4 members, and this model predicts by 'members' with 2"):
        assert stored_temperature(FITTED, "members", 2) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("calibration", "expected"), [(FITTED, 1.3), ({}, 1.0), ({**FITTED, "num_members": 2, "temperature": 1.0}, 1.0)]
)
def test_nothing_is_said_where_no_temperature_is_lost(calibration: dict[str, Any], expected: float) -> None:
    assert stored_temperature(calibration, "members", 4) == expected
