"""The variance behind each norm of a classifier against members, and what the rules of wide Gaussians are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.models.single_pass import drawn, tangents
from hf_bayes.models.single_pass.gaussian_tensor import mean_of
from hf_bayes.models.single_pass.wide_norms import norm_columns
from scripts.reproduce.small_models import FAMILIES, attached
from tests.models.single_pass.test_driver import run
from tests.tiny_models import inputs_of

FAMILY, NUM_DRAWS, RANK = "bert, four blocks", 2000, 1024


def reading(model: Any, kept: dict[str, list[Any]]) -> list[Any]:
    """Keep the outputs of the norms of random blocks and of the model; return the hooks."""

    def hook(path: str) -> Callable[..., None]:
        return lambda module, args, output: kept.setdefault(path, []).append(output)

    modules = [(path, module) for path, module in model.named_modules() if path.endswith(("LayerNorm", "classifier"))]
    return [module.register_forward_hook(hook(path)) for path, module in modules if "embeddings" not in path]


@torch.no_grad()
def ratios(variance: float) -> dict[str, tuple[float, float]]:
    """Return by module: total variance of a pass over that of members, and error of the mean over its norm."""
    build, subspace = FAMILIES[FAMILY]
    model = build()
    inputs = inputs_of(model, rows=2)
    rows = len(inputs["input_ids"])
    drawn_outputs: dict[str, list[Tensor]] = {}
    passed: dict[str, list[Any]] = {}
    with attached(model, subspace, variance) as bayesian:
        hooks = reading(bayesian.model, drawn_outputs)
        theta = bayesian.posterior.approximation.sample(NUM_DRAWS, torch.Generator().manual_seed(0))
        for some in theta.split(250):
            with bayesian.members.bind(some):
                bayesian.members.logits(inputs)
        for handle in hooks:
            handle.remove()
        hooks = reading(bayesian.model, passed)
        run(bayesian, inputs, structure="low_rank", rank=RANK)
        for handle in hooks:
            handle.remove()
    found = {}
    for path, parts in drawn_outputs.items():
        members, own = torch.cat([part.unflatten(0, (-1, rows)) for part in parts]), passed[path][0]
        mean = members.mean(0)
        error = (mean_of(own) + own.spread.drift - mean).norm() / mean.norm()
        found[path] = float(own.spread.variance.sum() / members.var(0).sum()), float(error)
    return found


# 2,000 draws and 1,024 columns leave a standard error of .05 in the total of a few units
@pytest.mark.parametrize(("variance", "least", "most"), [(1e-4, 0.9, 1.1), (1e-2, 0.8, 1.25)])
def test_each_norm_keeps_the_variance_of_members(variance: float, least: float, most: float) -> None:
    found = ratios(variance)
    assert len(found) == 9  # two norms in each of four blocks, and the head
    for path, (ratio, error) in found.items():
        assert least < ratio < most, path
        assert error < (0.01 if variance < 1e-3 else 0.15), path


def test_a_mean_that_does_not_shrink_loses_variance_norm_by_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def unshrunk(*args: Any, **kwargs: Any) -> Tensor:
        found = norm_columns(*args, **kwargs)
        found[-1] = 0
        return found

    monkeypatch.setattr(tangents, "norm_columns", unshrunk)
    found = [ratio for path, (ratio, _) in ratios(1e-2).items() if path.endswith("LayerNorm")]
    assert found[0] > 0.9
    assert found[-1] < 0.75


def test_weights_that_read_the_mean_alone_lose_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_mean(expected: Tensor, columns: Tensor, shared: int) -> Tensor:
        return expected.expand(len(columns), *columns.shape[1:])

    monkeypatch.setattr(drawn, "at_draws", at_mean)
    found = [ratio for path, (ratio, _) in ratios(1e-2).items() if path.endswith("LayerNorm")]
    assert found[-1] < 0.75
