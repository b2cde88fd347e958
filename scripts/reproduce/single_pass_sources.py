"""The figures of ``single_pass`` on the variance of the logits from one kind of weights at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from hf_bayes import Posterior
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import Diagonal
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.linearised.outputs import gaussian_outputs
from scripts.reproduce.report import table
from scripts.reproduce.single_pass_subjects import Subject, without_labels


def sources(subject: Subject, posterior: Posterior) -> dict[str, dict[str, float]]:
    """Return the total variance of the logits from one kind of weights at a time, over that of the linearised model."""
    batch = {k: v[:24] for k, v in without_labels(subject.sets["held out"][0]).items()}
    kind: Any = MODELS[subject.task]
    model = kind.from_pretrained(posterior, base_model=subject.base(), prediction="members", check_base=False)
    gaussian = posterior.approximation
    assert isinstance(gaussian, Gaussian)
    stds = model.layout.unflatten(gaussian.covariances[0].variance.sqrt())
    kinds = ("classifier", *(f"{m}.lora_{f}" for m in ("query", "value", "attention.output.dense") for f in "AB"))
    groups = {k: [n for n in stds if k in n] for k in kinds}
    named = {name for names in groups.values() for name in names}
    groups |= {f"output.dense.lora_{f}": [n for n in stds if n not in named and f"lora_{f}" in n] for f in "AB"}
    found: dict[str, dict[str, float]] = {}
    for label, names in {"all": list(stds), **groups}.items():
        parts = {n: std if n in names else torch.full_like(std, 1e-12) for n, std in stds.items()}
        own = Gaussian(gaussian.means, (Diagonal(model.layout.flatten(parts)),))
        model.posterior = dataclasses.replace(posterior, approximation=own)
        whole = gaussian_outputs(model, own, batch).covariance.diagonal(dim1=-2, dim2=-1).sum()
        found[label] = {"linearised": float(whole)}
        for structure in ("low_rank", "diagonal"):
            model.single_pass(structure=structure)
            with torch.no_grad():
                total = model.predictor.outputs(model, batch)[1].diagonal(dim1=-2, dim2=-1).sum()
            found[label][structure] = round(float(total / whole), 3)
    whole_variance = found["all"]["linearised"]
    return {k: v | {"linearised": round(v["linearised"] / whole_variance, 4)} for k, v in found.items()}


def blocks(sources: Mapping[str, Any]) -> dict[str, str]:
    """Return the table of the kinds of weights."""
    lines = [
        [name, f"{row['linearised']:.3f}", f"{row['low_rank']:.2f}", f"{row['diagonal']:.3f}"]
        for name, row in sources.items()
    ]
    return {"sources": table(["random weights", "share", "low rank, 16 / linearised", "diagonal / linearised"], lines)}
