"""The scores of ``single_pass_table``. This module is not a command: ``single_pass_table`` imports it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_bayes.metrics.functions import expected_calibration_error, ood_auroc, risk_coverage

RESAMPLES = 200
"""The number of resamples of the test rows for standard errors. All cells of a task have the same resamples."""


class Found(NamedTuple):
    """A prediction for n rows.

    Attributes:
        log_probs: [n, C].
        epistemic: [n] in nats.
    """

    log_probs: Tensor
    epistemic: Tensor


def scores(found: Mapping[str, Found], labels: Tensor) -> dict[str, Any]:
    """Return the scores of a prediction, and AURC and NLL (times 1e5) of resampled test rows.

    Args:
        found: the name of a set -> its prediction.
        labels: [n] of the set "test".
    """
    log_probs = found["test"].log_probs.double().log_softmax(-1)
    nll = -log_probs.gather(-1, labels[:, None])[:, 0].numpy()
    best = log_probs.max(-1)
    wrong, doubt = (best.indices != labels).double().numpy(), 1 - best.values.exp().numpy()
    generator = np.random.default_rng(0)
    chosen = [generator.integers(len(nll), size=len(nll)) for _ in range(RESAMPLES)]

    def area(index: Any) -> float:
        return float(risk_coverage(doubt[index], wrong[index]).aurc)

    return {
        "accuracy": round(float(1 - wrong.mean()), 4),
        "nll": round(float(nll.mean()), 4),
        "ece": round(expected_calibration_error(1 - doubt, 1 - wrong), 4),
        "aurc": round(area(slice(None)), 5),
        "epistemic": round(float(found["test"].epistemic.mean()), 5),
        "auroc": {name: _detection(found["test"], other) for name, other in found.items() if name != "test"},
        "resampled_aurc": [round(1e5 * area(index)) for index in chosen],
        "resampled_nll": [round(1e5 * float(nll[index].mean())) for index in chosen],
    }


def _detection(test: Found, other: Found) -> dict[str, float]:
    """Return the AUROC of total and epistemic uncertainty as detectors of the rows of another set."""
    is_other = np.repeat([0, 1], [len(test.epistemic), len(other.epistemic)])

    def area(read: Callable[[Found], Tensor]) -> float:
        return round(ood_auroc(torch.cat([read(test), read(other)]).double().numpy(), is_other), 4)

    return {
        "total": area(lambda one: torch.special.entr(one.log_probs.double().exp()).sum(-1)),
        "epistemic": area(lambda one: one.epistemic),
    }
