"""J V J' through a live model against one row and one output at a time, and a Laplace approximation against HMC."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2ForSequenceClassification, LlamaForSequenceClassification

from hf_bayes import HMCConfig, LaplaceConfig, attach, fit_laplace, sample
from hf_bayes.core.layout import Layout, initial, select
from hf_bayes.diagnostics.convergence import ess, require_converged
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import COVARIANCES, Diagonal, Full, dense
from hf_bayes.models.linearised import outputs as linearised
from hf_bayes.models.linearised.outputs import gaussian_outputs
from hf_bayes.uncertainty.gaussian_links import LINKS
from scripts.reproduce.small_models import attached
from tests import tiny_models as models
from tests.members import subject_models
from tests.models.linear_cases import last_layer_bert, lora_bert, random_covariance, tagger
from tests.runs import label_rows
from tests.tiny_models import batch, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit, with_lora


def brute_force(model: nn.Module, layout: Layout, inputs: dict[str, Tensor], theta: Tensor) -> tuple[Tensor, Tensor]:
    """[B, ..., C] and [B, ..., C, d]: outputs and their derivatives, one row and one output at a time."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    chosen = [parameters[name] for name in layout.names]
    for name, value in layout.unflatten(theta).items():
        parameters[name].data = value.clone()
    for parameter in chosen:
        parameter.requires_grad_()
    outputs, rows = [], []
    for row in range(len(next(iter(inputs.values())))):
        logits = model(**{name: value[row : row + 1] for name, value in inputs.items()}).logits[0]
        gradients = [torch.autograd.grad(value, chosen, retain_graph=True) for value in logits.flatten()]
        flat = torch.stack([torch.cat([part.flatten() for part in one]) for one in gradients])
        rows.append(flat.view(*logits.shape, -1))
        outputs.append(logits.detach())
    return torch.stack(outputs), torch.stack(rows)


def last_layer_decoder() -> nn.Module:
    torch.manual_seed(0)
    config = tiny_llama(hidden_size=8, num_labels=3).config
    return LlamaForSequenceClassification(config).double().eval()


def lora_vit() -> nn.Module:
    return with_lora(tiny_vit(dtype=torch.float64, hidden_size=4, intermediate_size=6))


def gpt2_classifier() -> nn.Module:
    torch.manual_seed(0)
    return GPT2ForSequenceClassification(tiny_gpt2(n_embd=4, n_positions=16, num_labels=3).config).double().eval()


CASES = {
    "lora": (lora_bert, "trainable"),
    "images": (lora_vit, "trainable"),
    "Conv1D, norm, positions": (gpt2_classifier, r"h\.1\.mlp\.c_fc|ln_f|wpe"),
    "block": (last_layer_bert, "last_block"),
    "head": (last_layer_bert, "last_layer"),
    "decoder head": (last_layer_decoder, "last_layer"),
    "patches, norms": (lambda: tiny_vit(dtype=torch.float64, hidden_size=4, intermediate_size=6), r"projection|norm"),
    "convolutions, batch norms": (
        lambda: subject_models.resnet(torch.float64, embedding_size=4, hidden_sizes=[4], depths=[1]).eval(),
        r"stages|classifier",
    ),
    "tagger": (tagger, r"layer\.1\.attention\.self\.query"),
    "tagger's head": (tagger, "last_layer"),
}


@pytest.mark.parametrize("kind", COVARIANCES)
@pytest.mark.parametrize("case", CASES)
def test_covariance_of_outputs_is_that_of_brute_force(case: str, kind: str) -> None:
    build, subspace = CASES[case]
    model = build()
    inputs = models.inputs_of(model, padding="right")
    layout = select(model, subspace)
    start = initial(model, layout)
    theta = torch.stack([start, start + 0.1])
    covariances = tuple(random_covariance(kind, layout, seed) for seed in (0, 1))
    with attach(model, start[None].clone(), subspace=subspace) as bayesian:
        before = bayesian(**inputs).logits
        found = gaussian_outputs(bayesian, Gaussian(theta, covariances), inputs)
        assert torch.equal(bayesian(**inputs).logits, before)
    spread = found.covariance if found.covariance.ndim > found.mean.ndim else torch.diag_embed(found.covariance)
    for index in range(2):
        outputs, jacobian = brute_force(model, layout, inputs, theta[index])
        expected = jacobian @ dense(covariances[index], theta) @ jacobian.mT
        assert (found.mean[index] - outputs).abs().max() < 1e-9
        assert (spread[index] - expected).abs().max() < 1e-9 * expected.abs().max()
        other = jacobian @ dense(covariances[1 - index], theta) @ jacobian.mT
        assert (spread[index] - other).abs().max() > 0.01 * expected.abs().max()
        if "head" not in case:  # where outputs are linear, the derivative of one member is that of all
            _, elsewhere = brute_force(model, layout, inputs, theta[1 - index])
            wrong = elsewhere @ dense(covariances[index], theta) @ elsewhere.mT
            assert (spread[index] - wrong).abs().max() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("kind", COVARIANCES)
def test_a_head_needs_no_derivatives_of_outputs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a backward pass for each output")

    monkeypatch.setattr(linearised, "_reads", never)
    for build, subspace in (CASES["head"], CASES["decoder head"], CASES["tagger's head"]):
        model = build()
        layout = select(model, subspace)
        with attach(model, subspace=subspace) as bayesian:
            gaussian_outputs(
                bayesian, Gaussian(bayesian.theta.detach(), (random_covariance(kind, layout),)), models.batch()
            )


def test_a_head_whose_outputs_are_scaled_is_differentiated() -> None:
    class Scaled(type(last_layer_bert())):  # type: ignore[misc]
        def forward(self, **inputs: Any) -> Any:
            output = super().forward(**inputs)
            output.logits = 2 * output.logits
            return output

    plain = last_layer_bert()
    model = Scaled(plain.config).double().eval()
    model.load_state_dict(plain.state_dict())
    layout, inputs = select(model, "last_layer"), models.batch()
    covariance = random_covariance("kronecker", layout)
    with attach(model, subspace="last_layer") as bayesian:
        found = gaussian_outputs(bayesian, Gaussian(bayesian.theta.detach(), (covariance,)), inputs)
    theta = initial(model, layout)
    _, jacobian = brute_force(model, layout, inputs, theta)
    expected = jacobian @ dense(covariance, theta) @ jacobian.mT
    assert (found.covariance[0] - expected).abs().max() < 1e-9 * expected.abs().max()


def test_a_batch_in_pieces_is_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lora_bert()
    layout, inputs = select(model), models.batch(5, padding="right")
    with attach(model) as bayesian:
        gaussian = Gaussian(bayesian.theta.detach(), (random_covariance("kronecker", layout),))
        whole = gaussian_outputs(bayesian, gaussian, inputs)
        monkeypatch.setitem(linearised.RECORD_BUDGET, "cpu", (1, 1))
        pieces = gaussian_outputs(bayesian, gaussian, inputs)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize(("budget", "parts"), [((1, 1), 5), ((1, 1 << 60), 3), ((1 << 60, 1 << 60), 1)])
def test_a_pass_holds_as_much_as_the_weights(
    budget: tuple[int, int], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lora_bert()
    layout, inputs = select(model), models.batch(5, padding="right")
    monkeypatch.setitem(linearised.RECORD_BUDGET, "cpu", budget)
    with attach(model) as bayesian:
        calls: list[int] = []
        outputs = bayesian.outputs
        monkeypatch.setattr(bayesian, "outputs", lambda inputs: calls.append(1) or outputs(inputs))
        gaussian_outputs(
            bayesian, Gaussian.diagonal(bayesian.theta.detach(), torch.ones(1, layout.dim, dtype=torch.float64)), inputs
        )
    assert len(calls) == parts


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_callers_may_have_gradients_switched_off(mode: Any) -> None:
    model = with_lora(tiny_vit(dtype=torch.float64))
    layout = select(model)
    with attach(model) as bayesian:
        gaussian = Gaussian(bayesian.theta.detach(), (random_covariance("kronecker", layout),))
        expected = gaussian_outputs(bayesian, gaussian, models.images(dtype=torch.float64))
        with mode():
            found = gaussian_outputs(bayesian, gaussian, models.images(dtype=torch.float64))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("build", [lora_bert, tagger])
def test_autocast_leaves_covariances_their_dtype(build: Any) -> None:
    model = build().float()
    layout, inputs = select(model, r"lora_|query"), models.batch()
    with attach(model, subspace=r"lora_|query") as bayesian:
        gaussian = Gaussian.diagonal(bayesian.theta.detach(), torch.full((1, layout.dim), 1e-4))
        expected = gaussian_outputs(bayesian, gaussian, inputs).covariance
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = gaussian_outputs(bayesian, gaussian, inputs).covariance
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.05 * expected.norm()  # the model's own forward is in bfloat16


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_a_disabled_adapter_has_no_part_in_the_covariance(kind: str) -> None:
    found = []
    for subspace in ("lora_|classifier", "classifier"):
        model = with_lora(tiny_bert(dtype=torch.float64, num_labels=3))
        std = torch.full((select(model, subspace).dim,), 0.1, dtype=torch.float64)
        covariance = Diagonal(std) if kind == "diagonal" else Full((std**-1).diag())
        with attached(model, subspace, covariance=covariance) as bayesian, model.disable_adapter():
            found.append(bayesian.linearise()(**batch()).epistemic)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("predict", ["linearise", "single_pass"])
def test_without_its_only_adapter_a_model_has_no_uncertainty(predict: str) -> None:
    model = with_lora(tiny_bert(dtype=torch.float64, num_labels=3))
    with attached(model, "lora_") as bayesian:
        getattr(bayesian, predict)()
        assert float(bayesian(**batch()).epistemic.min()) > 0
        with model.disable_adapter():
            assert torch.equal(bayesian(**batch()).epistemic, torch.zeros(3, dtype=torch.float64))


def test_small_posteriors_spread_members_as_linearised() -> None:
    model = lora_bert()
    inputs = models.batch()
    with attach(model) as bayesian:
        mean = bayesian.theta.detach().clone()
        gaussian = Gaussian.diagonal(mean, torch.full_like(mean, 1e-4))
        found = gaussian_outputs(bayesian, gaussian, inputs).covariance[0]
        bayesian.show(gaussian.sample(2000, torch.Generator().manual_seed(0)))
        away = bayesian.member_logits(inputs).detach() - bayesian.member_logits(inputs).detach().mean(0)
    drawn = torch.einsum("mbi,mbj->bij", away, away) / 2000
    scale = found.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
    assert bool(((drawn - found).abs() < 5 * scale * (2 / 2000) ** 0.5).all())


def next_order(a: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return what logistic regression adds to Laplace's mean 0 and covariance I, to the next order in 1 / n.

    U = z'z / 2 to second order, and its third and fourth derivatives are sums of k_n a_n a_n ... with k3 = p(1 - p)
    (1 - 2p) and k4 = p(1 - p)(1 - 6p(1 - p)): the mean moves by -1/2 U_ijj, the covariance by
    -U_ijk mean_k - 1/2 U_ijkk + 1/2 U_ikl U_jkl.

    Args:
        a: [n, d] the derivative of the log odds of each row.
        p: [n] its probability.
    """
    third, fourth = p * (1 - p) * (1 - 2 * p), p * (1 - p) * (1 - 6 * p * (1 - p))
    length = a.square().sum(1)
    mean = -0.5 * (third * length) @ a
    inner = third[:, None] * (a @ a.T).square() * third
    return mean, 0.5 * a.T @ inner @ a - (a.T * (third * (a @ mean) + 0.5 * fourth * length)) @ a


def agree(draws: Tensor, covariance: Tensor, beyond: tuple[Tensor, Tensor]) -> bool:
    """Return whether draws [M, S, d] have mean 0 and this covariance, in 65 numbers.

    The tolerance is 4.5 standard errors at the measured ESS, and as much as Laplace leaves out to the next order.
    """
    z = draws @ torch.linalg.inv(torch.linalg.cholesky(covariance)).T
    products = (z[..., :, None] * z[..., None, :]).flatten(2)
    for values, expected, extra in (
        (z, torch.zeros(z.shape[2]), beyond[0]), (products, torch.eye(z.shape[2]).flatten(), beyond[1].flatten()),
    ):  # fmt: skip
        error = values.flatten(0, 1).std(0) / ess(values).sqrt()
        if bool(((values.mean((0, 1)) - expected).abs() > 4.5 * error + extra.abs()).any()):
            return False
    return True


def test_full_laplace_and_hmc_agree_on_logistic_regression() -> None:
    model, rows = tiny_bert(dtype=torch.float64, num_labels=2, hidden_size=4), label_rows(300, num_labels=2)
    inputs = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "attention_mask")}
    labels, features = torch.tensor([row["label"] for row in rows]), []
    with model.classifier.register_forward_pre_hook(lambda module, args: features.append(args[0].detach())):
        model(**inputs)
    phi = torch.cat([features[0], torch.ones(300, 1, dtype=torch.float64)], 1)

    def energy(theta: Tensor, batch: Any = None) -> Tensor:
        weights = torch.cat([theta[:, :8].view(-1, 2, 4), theta[:, 8:, None]], 2)
        log_probs = (phi @ weights.mT).log_softmax(-1)
        return -log_probs[:, torch.arange(300), labels].sum(1) + theta.square().sum(1) / 2

    mode = torch.zeros(10, dtype=torch.float64)
    for _ in range(8):  # Newton
        slope = torch.autograd.functional.jacobian(lambda theta: energy(theta[None])[0], mode)
        mode = mode - torch.linalg.solve(torch.autograd.functional.hessian(lambda t: energy(t[None])[0], mode), slope)
    model.classifier.weight.data, model.classifier.bias.data = mode[:8].view(2, 4).clone(), mode[8:].clone()
    config = LaplaceConfig(structure="full", num_samples=None, prior_std=1.0)
    posterior = fit_laplace(model, rows, config, subspace="last_layer")
    gaussian = posterior.approximation
    covariance = dense(gaussian.covariances[0], mode)
    root = torch.linalg.cholesky(covariance)
    # HMC has one law in all coordinates, and in these a large ESS: posterior variances lie between 0.003 and 1
    starts = 1.5 * torch.randn(64, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    run = sample(
        lambda z, batch=None: energy(mode + z @ root.T), starts, HMCConfig(num_chains=64),
        num_steps=300, learning_rate=0.1, burn_in=100,
    )  # fmt: skip
    require_converged(run.draws, "HMC")
    read, bias = phi[:, :4], phi[:, 4:]
    odds = torch.cat([read, -read, bias, -bias], 1)  # log odds of class 0 = odds @ theta
    beyond = next_order(odds @ root, (odds @ mode).sigmoid())
    eye = torch.eye(10, dtype=torch.float64)
    assert agree(run.draws, eye, beyond)
    assert not agree(run.draws, 1.4 * eye, beyond)  # the twin: variances that are 1.4 times too wide
    assert not agree(run.draws + 0.2, eye, beyond)  # the twin: a mean that is 0.2 standard deviations off
    draws = mode + run.draws[:, ::4].flatten(0, 1) @ root.T  # 3200
    few = {name: value[:20] for name, value in inputs.items()}
    with attach(model, draws, subspace="last_layer") as bayesian:
        exact = bayesian(**few)
        bayesian.posterior = posterior
        found = {link: bayesian.linearise(link)(**few) for link in LINKS}
        bayesian.show(mode[None])
        point = bayesian.linearise(None)(**few)
    for output in found.values():
        # measured 0.004, and 0.12 for the logarithm below; the posterior is Gaussian to first order only
        assert (output.logits.exp() - exact.logits.exp()).abs().max() < 0.01
    for link in ("monte_carlo", "bridge"):
        assert ((found[link].epistemic / exact.epistemic).log().abs() < 0.2).all()
    assert exact.epistemic.min() > 1e-3
    assert point.epistemic.max() == 0
