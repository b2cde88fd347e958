"""States around states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.joined_states import inner_state, joined_state, merged, rows_of, with_inner


class Inner(NamedTuple):
    theta: Tensor
    step: Tensor


INNER = Inner(torch.ones(2, 3), torch.tensor([4, 4]))


def test_a_common_field_is_held_once() -> None:
    theta, extra = torch.zeros(2, 3), torch.ones(2)
    state = joined_state({"theta": theta, "extra": extra}, INNER)
    assert state._fields == ("theta", "extra", "step")
    assert state.theta is theta
    inner = inner_state(state)
    assert isinstance(inner, Inner)
    assert (inner.theta is theta, inner.step is INNER.step) == (True, True)


def test_a_prefix_keeps_fields_of_one_name_apart() -> None:
    state = joined_state({"theta": torch.zeros(2, 5)}, INNER, prefix="own_")
    assert state._fields == ("theta", "own_theta", "own_step")
    assert inner_state(state).theta is INNER.theta
    after = with_inner(state, INNER._replace(step=torch.tensor([5, 5])))
    assert after.own_step.tolist() == [5, 5]
    assert after.theta is state.theta


def test_states_nest() -> None:
    middle = joined_state({"a": torch.zeros(2)}, INNER)
    outer = joined_state({"b": torch.ones(2)}, middle)
    assert inner_state(inner_state(outer)) == INNER
    assert type(joined_state({"b": torch.ones(2)}, middle)) is type(outer)


def test_states_of_groups_of_chains_are_put_together() -> None:
    whole = Inner(torch.arange(12.0).view(4, 3), torch.tensor([1, 2, 3, 4]))
    groups = [[2, 0], [3], [1]]
    parts = [(rows, rows_of(whole, rows)) for rows in groups]
    assert parts[0][1].step.tolist() == [3, 1]
    again = merged(parts)
    assert isinstance(again, Inner)
    assert all(torch.equal(found, value) for found, value in zip(again, whole, strict=True))
    assert rows_of(Inner(whole.theta, None), [1]).step is None
