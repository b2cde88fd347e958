from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.theta_form import Form
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests.chains.bowl import bowl, run


def named_bowl(theta: dict[str, Tensor], batch: object) -> Tensor:
    return 0.5 * theta["matrix"].square().sum((1, 2)) + 0.5 * theta["scalar"].square()


def test_a_dictionary_of_tensors_samples_as_one_tensor_does() -> None:
    flat = torch.randn(2, 7, generator=torch.Generator().manual_seed(0))
    named = {"matrix": flat[:, :6].view(2, 2, 3), "scalar": flat[:, 6]}
    one = run(theta=flat, method=SGHMCConfig())
    both = run(named_bowl, theta=named, method=SGHMCConfig())
    assert {name: tuple(draws.shape) for name, draws in both.draws.items()} == {
        "matrix": (2, 10, 2, 3),
        "scalar": (2, 10),
    }
    assert torch.allclose(both.draws["matrix"].flatten(2), one.draws[..., :6], rtol=1e-5)
    assert torch.allclose(both.draws["scalar"], one.draws[..., 6], rtol=1e-5)
    members = both.members(4)
    assert members["matrix"].shape == (4, 2, 3)
    assert torch.equal(members["scalar"], both.approximation.sample(4)[:, 6])


def test_a_column_is_found_in_the_tensor_that_holds_it() -> None:
    form, flat = Form.of({"matrix": torch.zeros(2, 2, 3), "scalar": torch.zeros(2)})
    assert flat.shape == (2, 7)
    assert [form.place_of(column) for column in (0, 5, 6)] == [", matrix", ", matrix", ", scalar"]
    assert Form.of(flat)[0].place_of(3) == ""


@pytest.mark.parametrize(
    ("theta", "message"),
    [
        ({}, "theta is an empty dictionary"),
        ({"": torch.zeros(2, 3)}, "theta has the name ''"),
        ({"a": torch.zeros(())}, r"theta\['a'\] must be a tensor \[M, \*shape\], .* got shape \[\]: for one chain"),
        ({"a": [1.0]}, r"theta\['a'\] must be a tensor .*, got list"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, r"must have one first axis .*, got {'a': 2, 'b': 3}"),
        ({"a": torch.zeros(2), "b": torch.zeros(2).double()}, "must have one dtype"),
        ({"a": torch.zeros(2, dtype=torch.bfloat16)}, "theta must be float32 or float64"),
    ],
)
def test_bad_dictionaries_are_refused_by_their_tensor(theta: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(bowl, theta=theta)


def test_errors_name_the_tensor_that_is_not_finite() -> None:
    def energy(theta: dict[str, Tensor], batch: object) -> Tensor:
        return named_bowl(theta, batch) + (theta["scalar"] - 1).sqrt()  # no gradient at 1

    with pytest.raises(FloatingPointError, match=r"non-finite gradient .*\(chains 0, 1, scalar\)"):
        run(energy, theta={"matrix": torch.ones(2, 2, 3), "scalar": torch.ones(2)})


def test_masses_differ_by_the_tensors_of_a_dictionary() -> None:
    def energy(theta: dict[str, Tensor], batch: object) -> Tensor:
        return 50 * theta["stiff"].square().sum(1) + 0.5 * theta["soft"].square().sum(1)

    method = SGHMCConfig(preconditioner="layerwise", preconditioner_batches=4)
    theta = {"stiff": torch.ones(2, 3), "soft": torch.ones(2, 3)}
    state = run(energy, theta=theta, method=method, num_steps=40, thin=20, learning_rate=0.01).state
    assert torch.equal(state.mass[:, 1], torch.ones(2))
    assert bool((state.mass[:, 0] > 5).all())
