"""The networks of ``streamlined_tables``: MLPs, their posteriors, and the ways in which a posterior predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_bayes import LaplaceConfig, MeanFieldConfig, attach, fit_laplace, sample
from hf_bayes.core.rng import generator
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.models.linearised.outputs import gaussian_outputs
from hf_bayes.models.single_pass.predictors import SinglePassPredictor
from hf_bayes.uncertainty.gaussian_links import LINKS, log_density

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


ROWS_AT_ONCE = 50
"""The number of rows in a single pass: with a full posterior, each row takes d numbers for each pair of units."""


class MLPConfig(PreTrainedConfig):
    """The widths of an MLP, from inputs to outputs, and its activation."""

    model_type = "mlp"

    def __init__(self, widths: Sequence[int] = (4, 8, 3), activation: str = "relu", **options: Any) -> None:
        self.widths, self.activation = list(widths), activation
        super().__init__(num_labels=widths[-1], **options)


class MLPForSequenceClassification(PreTrainedModel):
    """An MLP on vectors, as a model of transformers. One output is a regression."""

    config_class = MLPConfig
    main_input_name = "input_values"

    def __init__(self, config: MLPConfig) -> None:
        super().__init__(config)
        layers: list[nn.Module] = []
        for into, out in zip(config.widths, config.widths[1:], strict=False):
            layers += [nn.Linear(into, out), ACTIVATIONS[config.activation]()]
        self.layers = nn.Sequential(*layers[:-1])
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the initial weights of torch."""

    def forward(self, input_values: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Return logits [B, C] of vectors [B, n]."""
        return SequenceClassifierOutput(logits=self.layers(input_values))


def mlp(widths: Sequence[int], activation: str = "relu", seed: int = 0) -> MLPForSequenceClassification:
    """Return an MLP in float64 with seeded weights."""
    torch.manual_seed(seed)
    regression = widths[-1] == 1
    return (
        MLPForSequenceClassification(MLPConfig(widths, activation, problem_type="regression" if regression else None))
        .double()
        .eval()
    )


class Task(NamedTuple):
    """Standardised data: inputs [n, d], and classes [n] or numbers [n]."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    widths: tuple[int, ...]

    @property
    def regression(self) -> bool:
        """True if the labels are numbers."""
        return self.widths[-1] == 1


def logits_of(theta: Tensor, x: Tensor, widths: Sequence[int]) -> Tensor:
    """Return the outputs [M, n, C] of ReLU networks with weights theta [M, d] at x [n, widths[0]]."""
    shapes = list(zip(widths[1:], widths[:-1], strict=True))
    parts = theta.split([size for out, into in shapes for size in (out * into, out)], 1)
    hidden = x.expand(len(theta), -1, -1)
    for layer, shape in enumerate(shapes):
        hidden = hidden.relu() if layer else hidden
        hidden = torch.baddbmm(parts[2 * layer + 1][:, None], hidden, parts[2 * layer].unflatten(1, shape).mT)
    return hidden


def energy_of(task: Task, noise_std: float, prior_std: float) -> Any:
    """Return U(theta, batch) [M] of the training data, for ``sample``."""

    def energy(theta: Tensor, batch: Any = None) -> Tensor:
        outputs = logits_of(theta, task.x, task.widths)
        if task.regression:
            fit = (outputs[..., 0] - task.y).square().sum(1) / (2 * noise_std**2)
        else:
            labels = task.y.expand(len(theta), -1)
            fit = F.cross_entropy(outputs.mT, labels, reduction="none").sum(1)
        return fit + theta.square().sum(1) / (2 * prior_std**2)

    return energy


def map_estimate(
    model: MLPForSequenceClassification, task: Task, *, noise_std: float, prior_std: float, steps: int
) -> Tensor:
    """Train the model by Adam on full batches, and return its weights [1, d]."""
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])[None].requires_grad_()
    energy = energy_of(task, noise_std, prior_std)
    optimizer = torch.optim.Adam([theta], lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        energy(theta).sum().backward()
        optimizer.step()
        schedule.step()
    nn.utils.vector_to_parameters(theta[0].detach(), model.parameters())
    return theta.detach()


def laplace(model: MLPForSequenceClassification, task: Task, structure: str, prior_std: float, noise_std: float) -> Any:
    """Return the Laplace posterior with the exact GGN. The prior and the noise follow from the evidence."""
    rows = [{"input_values": x, "labels": y} for x, y in zip(task.x, task.y, strict=True)]
    method = LaplaceConfig(
        structure=structure, num_samples=None, prior_std=prior_std, fit_prior="evidence", fit_noise=task.regression,
        check_gradient=False,
    )  # fmt: skip
    noise = {"noise_std": noise_std} if task.regression else {}
    return fit_laplace(model, rows, method, subspace="all", batch_size=256, **noise)


def mean_field(task: Task, start: Tensor, *, noise_std: float, prior_std: float, steps: int, seed: int) -> Gaussian:
    """Return the mean-field Gaussian of variational inference, started at the MAP estimate."""
    found = sample(
        energy_of(task, noise_std, prior_std), start, MeanFieldConfig(num_chains=1, num_draws=1),
        num_steps=steps, learning_rate=0.01, seed=seed,
    )  # fmt: skip
    assert isinstance(found.approximation, Gaussian)
    return found.approximation


class Outputs(NamedTuple):
    """Gaussian outputs: mean [B, C], covariance [B, C, C]."""

    mean: Tensor
    covariance: Tensor


def glm(model: MLPForSequenceClassification, posterior: Any, x: Tensor) -> Outputs:
    """Return the outputs of the linearised model."""
    with attach(model, subspace="all", **_noise(model)) as bayesian:
        found = gaussian_outputs(bayesian, posterior.approximation, {"input_values": x})
    return Outputs(found.mean[0], found.covariance[0])


def single_pass(model: MLPForSequenceClassification, posterior: Any, x: Tensor) -> Outputs:
    """Return the outputs of a single pass with the full covariance of hidden units, the paper's rules for MLPs."""
    with attach(model, subspace="all", **_noise(model)) as bayesian:
        bayesian.posterior = posterior
        predictor = SinglePassPredictor(bayesian, structure="full")
        parts = [predictor.outputs(bayesian, {"input_values": part}) for part in x.split(ROWS_AT_ONCE)]
    mean, covariance = (torch.cat(pieces, 1)[0].detach() for pieces in zip(*parts, strict=True))
    return Outputs(mean, covariance)


def with_gaussian(posterior: Any, gaussian: Gaussian) -> Any:
    """Return the posterior with another Gaussian."""
    return replace(posterior, approximation=gaussian, config=replace(posterior.config, approximation=gaussian.kind))


def members(gaussian: Gaussian, x: Tensor, widths: Sequence[int], number: int, seed: int) -> Tensor:
    """Return outputs [M, B, C] of draws."""
    rng = generator(seed, "members")
    return torch.cat([logits_of(gaussian.sample(1, rng), x, widths) for _ in range(number)])


def log_probs_of_members(outputs: Tensor) -> Tensor:
    """Return [B, C], the logarithm of the members' mean probabilities."""
    return outputs.log_softmax(-1).logsumexp(0) - torch.tensor(float(len(outputs))).log()


def log_probs_of(outputs: Outputs, factor: float = 1.0) -> Tensor:
    """Return [B, C] by the probit approximation (app. C.5), with the covariance times ``factor``."""
    return LINKS["probit"](outputs.mean[None], factor * outputs.covariance[None]).log_probs


def nlpd(outputs: Outputs, y: Tensor, noise_std: float | None, factor: float = 1.0) -> Tensor:
    """Return [B] the negative log predictive density of labels; ``noise_std`` is None for classes."""
    if noise_std is None:
        return F.nll_loss(log_probs_of(outputs, factor), y, reduction="none")
    return -log_density(y[:, None], outputs.mean[None], factor * outputs.covariance[None], noise_std).reshape(len(y))


def best_factor(outputs: Outputs, y: Tensor, noise_std: float | None) -> float:
    """Return the factor of the covariance with the lowest NLPD of the training data, from a grid (section 3)."""
    grid = torch.logspace(-4, 2, 61, dtype=torch.float64).tolist()
    return min(grid, key=lambda factor: float(nlpd(outputs, y, noise_std, factor).mean()))


def _noise(model: MLPForSequenceClassification) -> dict[str, float]:
    return {"noise_std": 1.0} if model.config.num_labels == 1 else {}
