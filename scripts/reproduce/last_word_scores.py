"""The scores of a model in ``last_word``: losses and uncertainties of last words, and AUROCs between texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_bayes.metrics import ood_auroc
from hf_bayes.models.base import BayesianModel
from scripts.reproduce.last_word_statements import Statement

OTHERS = ("rot13", "shuffled", "code")
EDGES = {"total": np.linspace(0, 8, 33), "epistemic": np.linspace(0, 0.4, 41)}
"""The edges of the histograms in nats. Only the histograms leave out values beyond the last edge."""


@torch.no_grad()
def score(model: BayesianModel, tokenizer: Any, questions: Sequence[Statement]) -> dict[str, np.ndarray]:
    """Return nll, total and epistemic [statements] in nats, for the first token of the last word."""
    pieces = []
    ids = [tokenizer(one.prompt)["input_ids"] + tokenizer(" " + one.last)["input_ids"][:1] for one in questions]
    for start in range(0, len(ids), 50):
        rows = ids[start : start + 50]
        width = max(map(len, rows))
        tokens, labels = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -100)
        mask = torch.zeros_like(tokens)
        for i, row in enumerate(rows):
            tokens[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
            labels[i, len(row) - 1] = row[-1]
        pieces.append(model.evaluate_batch({"input_ids": tokens, "attention_mask": mask, "labels": labels})[0])
    return {
        name: torch.cat([piece[name] for piece in pieces]).double().numpy() for name in ("nll", "total", "epistemic")
    }


@torch.no_grad()
def window_nll(model: BayesianModel, rows: Any) -> float:
    """Return the mean NLL in nats over all tokens of windows of one length."""
    ids = torch.tensor(rows["input_ids"])
    pieces = [model.evaluate_batch({"input_ids": part, "labels": part})[0]["nll"] for part in ids.split(8)]
    return float(torch.cat(pieces).mean())


def measured(model: BayesianModel, tokenizer: Any, questions: Mapping[str, Sequence[Statement]]) -> dict[str, Any]:
    """Return losses and AUROCs of one model, and the values of the histograms."""
    found = {name: score(model, tokenizer, asked) for name, asked in questions.items()}
    inside = found["test"]
    return {
        "loss": {name: float(scores["nll"].mean()) for name, scores in found.items()},
        "mean": {
            name: {kind: float(scores[kind].mean()) for kind in ("total", "epistemic")}
            for name, scores in found.items()
        },
        "auroc": {
            name: {
                kind: ood_auroc(
                    np.concatenate([inside[kind], found[name][kind]]),
                    np.repeat([0, 1], [len(inside[kind]), len(found[name][kind])]),
                )
                for kind in ("total", "epistemic")
            }
            for name in OTHERS
        },
        "histogram": {
            kind: {name: np.histogram(found[name][kind], EDGES[kind])[0].tolist() for name in ("test", "rot13")}
            for kind in ("total", "epistemic")
        },
    }
