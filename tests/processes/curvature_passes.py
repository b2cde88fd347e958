"""Curvature passes with rows that the processes of a launch share: ``look``, and its twin ``deaf`` without messages."""

from __future__ import annotations

import unittest.mock
from typing import Any

import torch
from torch import Tensor
from transformers import default_data_collator

from hf_bayes import LaplaceConfig, Posterior, fit_laplace
from hf_bayes.distributions.covariance import dense
from hf_bayes.fit import laplace as laplace_fit
from hf_bayes.members.mesh import ChainMesh
from hf_bayes.methods.laplace import gradient_estimate
from hf_bayes.methods.laplace.supported import STRUCTURES, CurvatureSpec
from hf_bayes.models.attaching import attach
from hf_bayes.objectives.curvature_pass import run_curvature_pass
from hf_bayes.uncertainty.custom.weighted import Weighted
from tests import runs
from tests.tiny_models import tiny_bert, tiny_gpt2, with_lora


def curvature_passes() -> dict[str, Tensor]:
    """Return what nine shared rows give: "look" or "deaf"/structure or estimator -> tensor."""
    mesh, deaf = ChainMesh(1, torch.device("cpu")), ChainMesh(1, torch.device("cpu"))
    deaf.sum_over_data = lambda tensor: tensor
    found: dict[str, Tensor] = {}
    for name, processes in (("look", mesh), ("deaf", deaf)):
        for make in (_of_a_language_model, _of_a_classifier, _of_weighted_rows, _of_a_fit):
            found |= {f"{name}/{key}": tensor.contiguous() for key, tensor in make(processes).items()}
    return found


def _token_rows() -> list[dict[str, Any]]:
    return runs.token_rows([8, 5, 7, 8, 3, 8, 6, 4, 7])


def _of_a_language_model(mesh: ChainMesh) -> dict[str, Tensor]:
    rows, collate = _token_rows(), runs.padding_collator()

    def batches(numbers: Any) -> Any:
        return (collate([rows[number] for number in numbers[start : start + 2]])
                for start in range(0, len(numbers), 2))  # fmt: skip

    combinations = {structure: CurvatureSpec(structure=structure) for structure in STRUCTURES if structure != "full"}
    combinations |= {estimator: CurvatureSpec(estimator=estimator) for estimator in ("ef_sequence", "ef_token")}
    combinations["reduce"] = CurvatureSpec(structure="kronecker_corrected", sharing="reduce")
    tensors: dict[str, Tensor] = {}
    with attach(with_lora(tiny_gpt2(dtype=torch.float64))) as model:
        for name, spec in combinations.items():
            found = run_curvature_pass(model, model.theta[0].detach(), batches, len(rows), spec, mesh=mesh)
            whole = spec.structure != "diagonal"  # else the rest is zeros
            tensors[name] = found.curvature.dense() if whole else found.curvature.diagonal
            tensors[f"{name}/gradient"] = found.gradient.half_batch_gradients
            with unittest.mock.patch.multiple(gradient_estimate, SMALL=0, LEAST_ROWS=4):  # of nine rows
                part = run_curvature_pass(model, model.theta[0].detach(), batches, len(rows), spec, mesh=mesh)
            tensors[f"{name}/halves"] = part.gradient.half_batch_gradients
            tensors[f"{name}/sums"] = torch.tensor([found.log_lik, found.num_terms], dtype=torch.float64)
    return tensors


def _of_a_classifier(mesh: ChainMesh) -> dict[str, Tensor]:
    rows = runs.label_rows(9)

    def batches(numbers: Any) -> Any:
        return (default_data_collator([rows[number]]) for number in numbers)

    tensors: dict[str, Tensor] = {}
    with attach(tiny_bert(dtype=torch.float64, hidden_size=4, intermediate_size=6), subspace="last_layer") as model:
        for estimator in ("ggn", "hessian"):
            spec = CurvatureSpec(estimator=estimator, structure="full")
            found = run_curvature_pass(model, model.theta[0].detach(), batches, len(rows), spec, mesh=mesh)
            tensors[estimator] = found.curvature.dense()
    return tensors


def _of_weighted_rows(mesh: ChainMesh) -> dict[str, Tensor]:
    rows = runs.label_rows(9)

    def batches(numbers: Any) -> Any:
        for number in numbers:
            batch = default_data_collator([rows[number]])
            # row 0 has the weight 0
            yield batch | {"labels": torch.stack([batch["labels"].double(), torch.tensor([number / 4.0])], 1)}

    tensors: dict[str, Tensor] = {}
    small = tiny_bert(dtype=torch.float64, hidden_size=4, intermediate_size=6)
    with attach(small, subspace="last_layer", likelihood=Weighted()) as model:
        for structure in STRUCTURES:
            spec = CurvatureSpec(structure=structure, estimator="ef_sequence")
            found = run_curvature_pass(model, model.theta[0].detach(), batches, len(rows), spec, mesh=mesh)
            tensors[f"weighted/{structure}"] = found.curvature.dense()
    return tensors


def _of_a_fit(mesh: ChainMesh) -> dict[str, Tensor]:
    def posterior(structure: str, **options: Any) -> Posterior:
        model, method = with_lora(tiny_gpt2(dtype=torch.float64)), LaplaceConfig(structure=structure, prior_std=0.5)
        return fit_laplace(model, _token_rows(), method, collate=runs.padding_collator(), batch_size=2, **options)

    with unittest.mock.patch.object(laplace_fit, "ChainMesh", return_value=mesh):
        kfac = posterior("kronecker")
        # 32 rows: a deaf process has enough terms, too
        calibration = posterior("kronecker", heldout=runs.token_rows(32, seed=5)).config.calibration
    (note,) = kfac.config.diagnostics["laplace"]
    found = [note[key] for key in ("log_lik", "log_evidence", "gradient_norm", "displacement")]
    return {
        "fit": torch.linalg.inv(dense(kfac.approximation.covariances[0], kfac.approximation.means)),
        "fit/note": torch.tensor(found, dtype=torch.float64),
        "fit/calibration": torch.tensor([calibration[key] for key in ("num_terms", "nll", "temperature")]).double(),
    }
