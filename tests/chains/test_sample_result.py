from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from tests.chains.bowl import bowl, run


def with_aux(theta: Tensor, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return bowl(theta, None), {"norm": theta.norm(dim=1), "sign": theta > 0, "batch": theta[:, 0] * 0 + (batch or 0)}


@pytest.mark.parametrize("method", [SGHMCConfig(), HMCConfig()], ids=["rule", "kernel"])
def test_what_an_energy_returns_besides_is_that_of_the_draws(method: Any) -> None:
    result = run(with_aux, method=method, burn_in=3, thin=2)
    assert torch.allclose(result.aux["norm"], result.draws.norm(dim=2))
    assert torch.equal(result.aux["sign"], result.draws > 0)
    assert torch.equal(result.draws, run(method=method, burn_in=3, thin=2).draws)


def test_it_may_be_one_tensor_for_the_batches_of_an_update() -> None:
    result = run(lambda theta, batch: (bowl(theta, batch), theta[:, :2] * 0 + batch), batches=[1.0, 2.0, 3.0], thin=2)
    assert result.aux.shape == (2, 5, 2)
    assert result.aux[0, :, 0].tolist() == [2, 1, 3, 2, 1]
    two = run(lambda theta, batch: (bowl(theta, batch), theta[:, 0] * 0 + batch), batches=[1.0, 3.0],
              batches_per_step=2)  # fmt: skip
    assert two.aux.unique().tolist() == [2]  # the mean


def test_an_energy_that_returns_only_its_value_has_none() -> None:
    assert run().aux is None
    assert run().report == {}


def test_members_are_draws_of_the_approximation() -> None:
    result = run(method=MeanFieldConfig())
    drawn = result.members(5, torch.Generator().manual_seed(1))
    assert torch.equal(drawn, result.approximation.sample(5, torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (torch.ones(3), r"with aux a tensor \[M, ...\] .*, one entry for each of 2 chains; got shape \[3\]"),
        ({"a": torch.ones(2), "b": 1.0}, "got float for 'b'"),
        ("text", "got str"),
    ],
)
def test_what_has_no_chain_axis_is_refused(aux: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(lambda theta, batch: (bowl(theta, batch), aux))


def test_results_that_change_their_names_are_refused() -> None:
    calls = iter([None, None, {"norm": torch.ones(2)}])

    def changing(theta: Tensor, batch: Any) -> Any:
        return bowl(theta, batch), next(calls, {"mean": torch.ones(2)})

    with pytest.raises(ValueError, match="same results beside its value in every call, got 'norm' after none"):
        run(changing)


@pytest.mark.parametrize("theta", [torch.ones(2, 500), {f"layer{i}": torch.ones(2, 7) for i in range(30)}])
def test_a_result_prints_a_few_lines(theta: Any) -> None:
    def energy(theta: Any, batch: Any) -> tuple[Tensor, Tensor]:
        flat = theta if isinstance(theta, Tensor) else torch.cat(list(theta.values()), 1)
        return bowl(flat, batch), flat.norm(dim=1)

    shown = repr(run(energy, theta=theta, method=SGHMCConfig(), burn_in=4))
    assert len(shown.splitlines()) == 5
    assert max(map(len, shown.splitlines())) < 160
    assert shown.startswith("SampleResult of sghmc: 2 chains of 6 draws\n  draws: ")
    assert ("draws: [2, 6, 500]" if isinstance(theta, Tensor) else "layer0 [2, 6, 7], layer1") in shown
    assert "kinetic_temperature " in shown
    assert "aux: [2, 6]" in shown


def test_no_members_are_refused() -> None:
    for method in (MeanFieldConfig(), SGHMCConfig()):
        with pytest.raises(ValueError, match="asked for 0 members"):
            run(method=method).members(0)
