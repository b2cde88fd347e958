"""The held-out report of a student: how near it comes to the prediction that it imitates."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from hf_bayes.fit.distil_targets import Targets
from hf_bayes.fit.distil_training import Output, chunks, kl
from hf_bayes.metrics import ood_auroc
from hf_bayes.uncertainty.decomposition import Prediction, Uncertainty
from hf_bayes.uncertainty.student_head import StudentHead


@torch.no_grad()
def predictions_of(head: StudentHead, targets: Targets, output: Output) -> Prediction:
    """Return the predictions of a head at all terms."""
    found = [head(targets.hidden[index], output) for index in chunks(targets)]
    parts = (torch.cat(values) for values in zip(*(one.uncertainty for one in found), strict=True))
    return Prediction(torch.cat([one.log_probs for one in found]), Uncertainty(*parts))


def report_of(heldout: Targets, head: StudentHead, output: Output, other: Targets | None) -> dict[str, float | None]:
    """Return the figures of the held-out terms.

    Args:
        other: terms of other rows, for AUROCs; rows are ranked by the mean epistemic uncertainty of their terms.
    Returns:
        kl: mean KL(mixture || student) in nats. total_correlation, epistemic_correlation: rank correlations with the
        mixture's. epistemic_ratio: mean EU over the mixture's. With ``other``: auroc, and teacher_auroc of the mixture.
        A figure is None where it is not defined, as a correlation with an uncertainty that is the same everywhere.
    """
    found = predictions_of(head, heldout, output)
    total = heldout.aleatoric + heldout.epistemic
    report = {
        "kl": float(kl(heldout, found).mean()),
        "total_correlation": rank_correlation(total, found.uncertainty.total),
        "epistemic_correlation": rank_correlation(heldout.epistemic, found.uncertainty.epistemic),
        "epistemic_ratio": float(found.uncertainty.epistemic.mean() / heldout.epistemic.mean()),
    }
    if other is not None:
        elsewhere = predictions_of(head, other, output).uncertainty.epistemic
        own = (heldout.row, found.uncertainty.epistemic, heldout.epistemic)
        pairs = zip(_by_row(*own), _by_row(other.row, elsewhere, other.epistemic), strict=True)
        report["auroc"], report["teacher_auroc"] = (auroc(inside, outside) for inside, outside in pairs)
    return {name: value if math.isfinite(value) else None for name, value in report.items()}


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's rank correlation; NaN if all numbers of one side are equal."""
    from scipy.stats import ConstantInputWarning, spearmanr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        return float(spearmanr(x.double().cpu().numpy(), y.double().cpu().numpy()).statistic)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Return the area under the curve by which larger values find the rows of ``outside``."""
    scores = torch.cat([inside, outside]).double().cpu().numpy()
    return ood_auroc(scores, [0] * len(inside) + [1] * len(outside))


def _by_row(row: Tensor, *values: Tensor) -> list[Tensor]:
    """Return the means of values over the terms of each row."""
    _, index, count = row.unique(return_inverse=True, return_counts=True)
    return [torch.zeros(len(count), device=value.device).index_add(0, index, value) / count for value in values]
