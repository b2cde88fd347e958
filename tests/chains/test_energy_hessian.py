from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.energy_hessian import EnergyAtPoint
from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import generator
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import dense
from hf_bayes.methods.laplace.curvature import NotPositiveDefinite
from hf_bayes.methods.laplace.laplace import LaplaceConfig

CLOSED_FORM = 1e-8
"""The promise. In float64, rounding of condition numbers up to 1e3 leaves about 1e-12."""


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator("hessian", *shape), dtype=torch.float64)


def precision(dim: int) -> Tensor:
    return numbers(dim, dim) @ numbers(dim, dim).mT + torch.eye(dim, dtype=torch.float64)


def bowl_of(matrix: Tensor, mode: Tensor) -> Any:
    def energy(theta: Tensor, batch: object) -> Tensor:
        return 0.5 * ((theta - mode) @ matrix * (theta - mode)).sum(1)

    return energy


def laplace(energy: Any, theta: Tensor, **changes: Any) -> Any:
    """Return the result around ``theta``, which has to be a MAP: AdamW does not move it."""
    arguments: dict[str, Any] = {"num_steps": 1, "learning_rate": 1e-6, "num_data": 1, **changes}
    method = {name: arguments.pop(name) for name in list(arguments) if hasattr(LaplaceConfig, name) and name != "prior"}
    return sample(energy, theta, LaplaceConfig(**method), **arguments)


def covariance(result: Any, component: int = 0) -> Tensor:
    assert isinstance(result.approximation, Gaussian)
    return dense(result.approximation.covariances[component], result.draws)


# ------------------------------------------------------------------------------------------------- Gaussian energies


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("structure", ["full", "low_rank", "diagonal"])
def test_a_gaussian_energy_gives_its_covariance(structure: str, temperature: float) -> None:
    matrix, mode = precision(12), numbers(2, 12)
    matrix = torch.diag(matrix.diagonal()) if structure == "diagonal" else matrix
    result = laplace(bowl_of(matrix, mode[:1]), mode[:1], structure=structure, temperature=temperature, rank=12)
    assert (covariance(result) - temperature * matrix.inverse()).abs().max() < CLOSED_FORM
    assert (result.approximation.mean - mode[0]).abs().max() < CLOSED_FORM


def test_lanczos_gives_the_covariance_of_few_stiff_directions() -> None:
    stiff = numbers(100, 5)
    matrix = stiff @ stiff.mT + 3 * torch.eye(100, dtype=torch.float64)
    result = laplace(bowl_of(matrix, stiff[:, 0]), stiff[:, :1].mT, structure="low_rank", rank=5)
    assert (covariance(result) - matrix.inverse()).abs().max() < CLOSED_FORM
    wrong = laplace(bowl_of(matrix, stiff[:, 0]), stiff[:, :1].mT, structure="low_rank", rank=4)
    assert (covariance(wrong) - matrix.inverse()).abs().max() > 1e-3  # a direction too few is seen


@pytest.mark.parametrize("structure", ["full", "low_rank"])
def test_the_evidence_of_a_gaussian_energy_is_its_integral(structure: str) -> None:
    matrix = precision(6)
    result = laplace(bowl_of(matrix, numbers(6)), numbers(6)[None], structure=structure, temperature=2.0)
    expected = 3 * math.log(2 * math.pi) - 0.5 * float(matrix.logdet())
    assert result.report["laplace"][0]["log_evidence"] == pytest.approx(expected, abs=1e-10)


def test_each_chain_has_a_gaussian_of_its_own() -> None:
    def energy(theta: Tensor, batch: object) -> Tensor:  # wells at -1 and 1, of curvature 8
        return (theta.square() - 1).square().sum(1) + theta.square().sum(1) * 0

    result = laplace(energy, torch.tensor([[-1.0], [1.0]], dtype=torch.float64), structure="full")
    assert result.approximation.means[:, 0].tolist() == pytest.approx([-1, 1])
    assert [float(covariance(result, k)) for k in (0, 1)] == pytest.approx([1 / 8, 1 / 8], abs=CLOSED_FORM)


# ---------------------------------------------------------------------------------------------- logistic regression

INPUTS, PRIOR_STD = numbers(150, 4), 0.7
LABELS = (INPUTS @ torch.tensor([1.0, -2.0, 0.5, 0.0]).double() + numbers(150) > 0).double()


def nats(theta: Tensor, batch: Tensor | None) -> Tensor:
    """Return minus the log-likelihood of all rows, or an estimate from the rows of a batch."""
    rows = torch.arange(150) if batch is None else batch
    logits = theta @ INPUTS[rows].mT
    losses = torch.nn.functional.softplus(logits) - LABELS[rows] * logits
    return 150 / len(rows) * losses.sum(1)


def posterior(theta: Tensor, batch: Tensor | None) -> Tensor:
    return nats(theta, batch) + 0.5 * theta.square().sum(1) / PRIOR_STD**2


def analytic(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Hessian of minus the log-likelihood, X' diag(p (1 - p)) X, and the gradient of U."""
    p = (INPUTS @ theta).sigmoid()
    return INPUTS.mT @ ((p * (1 - p))[:, None] * INPUTS), INPUTS.mT @ (p - LABELS) + theta / PRIOR_STD**2


@pytest.fixture(scope="module")
def mode() -> Tensor:
    """The MAP [4], by Newton's method."""
    theta = torch.zeros(4, dtype=torch.float64)
    for _ in range(30):
        hessian, gradient = analytic(theta)
        theta = theta - torch.linalg.solve(hessian + torch.eye(4).double() / PRIOR_STD**2, gradient)
    return theta


@pytest.mark.parametrize("batches", [None, list(torch.arange(150).split(30))])
def test_logistic_regression_has_its_analytic_hessian(mode: Tensor, batches: Any) -> None:
    hessian, _ = analytic(mode)
    expected = (hessian + torch.eye(4) / PRIOR_STD**2).inverse()
    for structure in ("full", "low_rank"):
        result = laplace(posterior, mode[None], structure=structure, batches=batches, learning_rate=1e-12)
        assert (covariance(result) - expected).abs().max() < CLOSED_FORM
        apart = laplace(nats, mode[None], structure=structure, prior=PRIOR_STD, batches=batches, learning_rate=1e-12)
        assert (covariance(apart) - expected).abs().max() < CLOSED_FORM
    diagonal = covariance(laplace(posterior, mode[None], batches=batches, learning_rate=1e-12))
    assert torch.allclose(diagonal, torch.diag(1 / (hessian.diagonal() + 1 / PRIOR_STD**2)), atol=CLOSED_FORM)


def test_a_tempered_likelihood_leaves_the_prior_as_it_is(mode: Tensor) -> None:
    hessian, _ = analytic(mode)
    result = laplace(nats, mode[None], structure="full", prior=PRIOR_STD, temperature=0.1, temper="likelihood",
                     learning_rate=1e-12)  # fmt: skip
    expected = (hessian / 0.1 + torch.eye(4) / PRIOR_STD**2).inverse()
    assert (covariance(result) - expected).abs().max() < CLOSED_FORM


def test_the_evidence_is_one_with_the_prior_apart_or_inside(mode: Tensor) -> None:
    log_normaliser = -4 * math.log(PRIOR_STD * math.sqrt(2 * math.pi))
    inside = laplace(posterior, mode[None], structure="full", learning_rate=1e-12).report["laplace"][0]
    apart = laplace(nats, mode[None], structure="full", prior=PRIOR_STD, learning_rate=1e-12).report["laplace"][0]
    assert inside["log_evidence"] + log_normaliser == pytest.approx(apart["log_evidence"], abs=1e-9)
    assert apart["gradient_norm"] < 1e-8


def test_the_prior_with_the_largest_evidence_is_found(mode: Tensor) -> None:
    found = laplace(nats, mode[None], structure="full", prior=PRIOR_STD, fit_prior="evidence", learning_rate=1e-12)
    tau = found.report["laplace"][0]["prior_precision"]
    hessian, _ = analytic(mode)
    effective = 4 - tau * float((hessian + tau * torch.eye(4)).inverse().trace())
    assert tau * float(mode.square().sum()) == pytest.approx(effective, rel=1e-6)  # MacKay's fixed point


def test_the_chain_that_did_not_reach_the_map_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="the weights are no MAP"):
        result = laplace(posterior, torch.ones(1, 4, dtype=torch.float64), structure="full")
    assert result.report["laplace"][0]["displacement"] > 1


# --------------------------------------------------------------------------------------------------------- bad input


def saddle(theta: Tensor, batch: object) -> Tensor:
    return 0.5 * (theta.square() @ torch.tensor([1.0, 2.0, -0.5])).expand(len(theta))


def test_a_negative_curvature_is_refused_by_its_coordinate() -> None:
    with pytest.raises(NotPositiveDefinite, match=r"1 of 3 eigenvalues are not, lowest -0.5 \(number 2\).*run more"):
        laplace(saddle, torch.zeros(1, 3))

    def named(theta: dict[str, Tensor], batch: object) -> Tensor:
        return saddle(torch.cat([theta["a"][:, None], theta["b"]], 1), batch)

    with pytest.raises(NotPositiveDefinite, match=r"\(number 2, b\)"):
        laplace(named, {"a": torch.zeros(1), "b": torch.zeros(1, 2)})  # type: ignore[arg-type]


@pytest.mark.parametrize("structure", ["full", "low_rank"])
def test_a_negative_curvature_is_refused_by_its_eigenvalue(structure: str) -> None:
    with pytest.raises(NotPositiveDefinite, match=r"lowest.* -0.5.*run more updates, start elsewhere, or add"):
        laplace(saddle, torch.zeros(1, 3), structure=structure)
    laplace(saddle, torch.zeros(1, 3), structure=structure, prior=1.0)  # a prior of precision 1 is enough


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": "factor"}, "bias='factor' is a Kronecker factor of a module, which an energy does not have"),
        ({"structure": "kronecker"}, "made of the inputs and outputs of modules, .* choose one of diagonal, low_rank"),
        ({"estimator": "ef_token"}, "estimator='ef_token' sums over likelihood terms, .*: leave estimator out"),
        ({"fit_prior": "evidence"}, "fit_prior='evidence' needs a prior apart from the energy, .*: give prior="),
        ({"fit_prior": "heldout", "prior": 1.0}, "fit_prior='heldout' of laplace needs held-out rows"),
        ({"fit_noise": True, "estimator": "hessian"}, "fit_noise=True is for regressions"),
        ({"batches": iter([None, None])}, "passes over the data more than once, .* pass a list, a DataLoader"),
    ],
)
def test_settings_that_an_energy_cannot_have_are_refused(changes: dict[str, Any], message: str) -> None:
    calls: list[int] = []

    def energy(theta: Tensor, batch: object) -> Tensor:
        calls.append(1)
        return theta.square().sum(1)

    with pytest.raises(ValueError, match=message):
        laplace(energy, torch.zeros(1, 3), **changes)
    assert not calls


def test_an_energy_without_a_second_derivative_is_named() -> None:
    def energy(theta: Tensor, batch: object) -> Tensor:  # fused attention has a first derivative only
        rows = theta.view(-1, 1, 4, 8)
        return torch.nn.functional.scaled_dot_product_attention(rows, rows, rows).square().sum((1, 2, 3))

    with pytest.raises(ValueError, match="needs an energy that can be differentiated twice"):
        laplace(energy, torch.randn(1, 32, generator=generator("attention")))


def test_a_linear_energy_has_no_curvature() -> None:
    point = EnergyAtPoint(lambda theta, batch: theta.sum(1), torch.ones(3), [None])
    assert torch.equal(point.hessian(), torch.zeros(3, 3))


def test_an_endless_stream_is_read_for_the_length_of_the_run() -> None:
    def endless() -> Any:
        while True:
            yield torch.arange(150)

    result = laplace(posterior, torch.zeros(1, 4, dtype=torch.float64), structure="full", batches=endless, num_steps=3)
    assert covariance(result).shape == (4, 4)
