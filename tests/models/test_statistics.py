"""Statistics of batch normalisation: from a trainer to a directory and into a new process."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from hf_bayes import (
    BayesianModelForImageClassification,
    EnsembleConfig,
    LaplaceConfig,
    SGHMCConfig,
    attach,
    fit_laplace,
    fit_swag,
)
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.layout import select
from hf_bayes.models.statistics import with_batch_norm_statistics
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs
from tests.members.reference import mixture, relative_error, scattered, separate_logits
from tests.members.subject_models import resnet
from tests.models.trained import from_disk
from tests.tiny_models import images


def digits(first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return pictures [n, 1, 16, 16] of handwritten digits, and their classes."""
    data = load_digits()
    pixels = np.kron(data.images[first:last] / 16 - 0.5, np.ones((1, 2, 2)))
    return torch.tensor(pixels, dtype=torch.float32)[:, None], torch.tensor(data.target[first:last])


def rows_of(first: int, last: int) -> list[dict[str, Any]]:
    return [{"pixel_values": pixels, "labels": int(label)} for pixels, label in zip(*digits(first, last), strict=True)]


def reader(folder: Path, **changes: Any) -> nn.Module:
    return from_disk(resnet(torch.float32, num_channels=1, num_labels=10, **changes), folder)


def trained(root: Path, method: MethodConfig, subspace: str = "all", **changes: Any) -> BayesianTrainer:
    settings = {"learning_rate": 0.1, "per_device_train_batch_size": 32, "max_steps": 25, "calibrate": False} | changes
    trainer = runs.trainer(root / "posterior", method, model=reader(root / "base"), train=rows_of(0, 320),
                           eval_dataset=rows_of(320, 400), subspace=subspace, **settings)  # fmt: skip
    trainer.train()
    trainer.save_model()
    return trainer


def test_statistics_are_those_of_separate_models_and_update_bn() -> None:
    model = resnet(torch.float64)
    layout, inputs = select(model, "all"), [images(4, seed, torch.float64) for seed in range(3)]
    theta = scattered(model, layout)
    expected = []
    for row in theta:
        twin = copy.deepcopy(model)
        twin.load_state_dict(layout.unflatten(row), strict=False)
        update_bn([batch["pixel_values"] for batch in inputs], twin)
        expected.append(twin.eval()(**images(5, 7, torch.float64)).logits.detach())
    with torch.no_grad(), attach(model, theta, subspace="all") as bayesian:
        bayesian.members_per_pass = 2
        complete = with_batch_norm_statistics(bayesian, bayesian.theta.detach(), inputs)
        assert torch.equal(complete[:, : layout.dim], theta)
        with bayesian.showing(complete):
            found = bayesian(**images(5, 7, torch.float64)).logits
        torch.testing.assert_close(found, mixture(torch.stack(expected)), rtol=0, atol=1e-12)
        assert with_batch_norm_statistics(bayesian, complete, []) is complete
        with pytest.raises(ValueError, match="no rows to estimate the statistics"):
            with_batch_norm_statistics(bayesian, theta, [])


def test_members_with_statistics_are_shown_and_not_attached() -> None:
    model = resnet(torch.float32)
    layout, given = select(model, "all"), images(3, 7, torch.float32)
    with torch.no_grad(), attach(model, scattered(model, layout), subspace="all") as bayesian:
        complete = with_batch_norm_statistics(bayesian, bayesian.theta.detach(), [images(4, 0, torch.float32)])
        with bayesian.showing(complete):
            expected = bayesian(**given).logits
    advice = rf"attach\(model, theta\[:, :{layout.dim}\]\), and give all columns to its show\(theta\)"
    with pytest.raises(ValueError, match=rf"running_mean.* no parameters.*{advice}"):
        attach(model, complete, subspace="all")
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.no_grad(), attach(model, complete[:, : layout.dim], subspace="all") as bayesian:
        bayesian.show(complete)
        assert torch.equal(bayesian(**given).logits, expected)


def test_a_model_without_random_batch_normalisation_has_none() -> None:
    with attach(resnet(torch.float32), subspace="convolution") as bayesian:
        assert with_batch_norm_statistics(bayesian, bayesian.theta, []) is bayesian.theta


LOAD = """
import sys, torch
from hf_bayes import BayesianModelForImageClassification
for folder in sys.argv[1:]:
    model = BayesianModelForImageClassification.from_pretrained(folder + "/posterior")
    with torch.no_grad():
        torch.save(model(pixel_values=torch.load(folder + "/pixels.pt")).logits, folder + "/logits.pt")
"""
METHODS = {"sghmc": SGHMCConfig(num_chains=2, draws_per_chain=2), "ensemble": EnsembleConfig(num_chains=3)}


def test_digits_are_read_the_same_in_a_new_process(tmp_path: Path) -> None:
    pixels, labels = digits(320, 400)
    expected: dict[str, Tensor] = {}
    for name, method in METHODS.items():
        trainer = trained(tmp_path / name, method)
        metrics = trainer.posterior.config.metrics
        assert metrics["nll"] == trainer.evaluate()["eval_nll"]
        assert metrics["map_nll"] < 2.3  # log 10 is chance; with the statistics of the base it is far above
        with torch.no_grad():
            expected[name] = trainer.bayesian(pixel_values=pixels).logits
        assert (expected[name].argmax(-1) == labels).double().mean() > 0.3  # chance is 0.1
        torch.save(pixels, tmp_path / name / "pixels.pt")
    command = [sys.executable, "-c", LOAD, *(str(tmp_path / name) for name in METHODS)]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])
    for name, logits in expected.items():
        found = torch.load(tmp_path / name / "logits.pt")
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-6)  # probabilities of about 1 in float32
        assert relative_error(mixture(logits_of_plain_models(tmp_path / name, pixels)), logits) < 1e-5  # float32


def logits_of_plain_models(root: Path, pixels: Tensor) -> Tensor:
    """Return [M, B, C] of ordinary models: the files of a member are entries of their state."""
    found = []
    for folder in sorted((root / "posterior" / "members").iterdir()):
        plain = reader(root / "plain")
        assert not plain.load_state_dict(load_file(folder / "model.safetensors"), strict=False).unexpected_keys
        found.append(plain.eval()(pixel_values=pixels).logits.detach())
    return torch.stack(found)


def test_a_changed_statistic_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, EnsembleConfig(num_chains=2), max_steps=2, map_updates=0)
    file = tmp_path / "posterior" / "members" / "member_001" / "model.safetensors"
    assert any(name.endswith("running_var") for name in load_file(file))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"member_001/model\.safetensors"):
        BayesianModelForImageClassification.from_pretrained(tmp_path / "posterior")


def test_statistics_of_frozen_layers_belong_to_the_base_model(tmp_path: Path) -> None:
    trained(tmp_path, EnsembleConfig(num_chains=2), "last_layer", max_steps=2, map_updates=0)
    base = reader(tmp_path / "other")
    base.resnet.embedder.embedder.normalization.running_mean += 1
    with pytest.raises(ValueError, match="another base model: it has other weights"):
        BayesianModelForImageClassification.from_pretrained(tmp_path / "posterior", base_model=base)


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        (LaplaceConfig(), {}, "laplace results in a distribution"),
        (
            SGHMCConfig(num_chains=2),
            {"learning_rate": None, "max_steps": 200},
            "for which every row has to .* set lear",
        ),
    ],
    ids=["a distribution", "a step size from the curvature"],
)
def test_methods_without_finished_draws_are_refused(
    method: MethodConfig, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = reader(tmp_path / "base")
    with pytest.raises(ValueError, match=rf"normalization\.weight belongs to batch normalisation.*{words}"):
        runs.trainer(tmp_path / "out", method, model=model, train=rows_of(0, 64), subspace="all", **changes)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_laplace_fit_keeps_the_statistics_of_its_model(tmp_path: Path) -> None:
    base, (pixels, _) = reader(tmp_path / "base").train(), digits(0, 64)
    for rows in pixels.split(16):
        base(pixel_values=rows)
    base = from_disk(base.eval(), tmp_path / "base")
    posterior = fit_laplace(base, rows_of(0, 32), LaplaceConfig(structure="diagonal"), subspace="all")
    posterior.save_pretrained(tmp_path / "posterior")
    loaded = BayesianModelForImageClassification.from_pretrained(tmp_path / "posterior").linearise(None)
    theta = loaded.theta.detach()
    assert theta.shape[1] == loaded.members.layout.dim
    with torch.no_grad():
        found = loaded(pixel_values=pixels[:4]).logits
    assert (
        relative_error(found, mixture(separate_logits(base, loaded.layout, theta, {"pixel_values": pixels[:4]}))) < 1e-5
    )


def test_there_is_no_gaussian_over_statistics(tmp_path: Path) -> None:
    method = SGHMCConfig(num_chains=1, draws_per_chain=3)
    posterior = trained(tmp_path, method, max_steps=6, map_updates=0).posterior
    with pytest.raises(ValueError, match=r"running_var: there is no Gaussian over the statistics"):
        fit_swag(posterior)


def test_a_loaded_posterior_is_no_start_of_training(tmp_path: Path) -> None:
    trained(tmp_path, EnsembleConfig(num_chains=2), max_steps=2, map_updates=0)
    loaded = BayesianModelForImageClassification.from_pretrained(tmp_path / "posterior")
    assert re.search("running_mean", " ".join(loaded.layout.names))
    with pytest.raises(ValueError, match="loaded from a posterior and has statistics: begin with its base model"):
        runs.trainer(tmp_path / "out", EnsembleConfig(num_chains=2), model=loaded, train=rows_of(0, 64))
