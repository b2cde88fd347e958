"""Acquisition: the rows of a pool that should be labelled next.

* "random": rows at random, which every other rule should be compared with.
* "entropy": the largest total uncertainty H[mean_m p_m].
* "bald": the largest epistemic uncertainty, the mutual information of label and weights (Houlsby et al. 2011).
* "batchbald": the largest mutual information of the weights and *all* k labels, greedily (Kirsch et al. 2019). A row
  that repeats a chosen one adds little. I[y_1..y_k; m] = H[mean_m prod_i p_m(y_i)] - sum_i mean_m H[p_m(y_i)].

The joint entropy of batchbald is exact up to ``_MAX_JOINT`` configurations of labels. After that, configurations are
drawn from the mixture, and the expectation is estimated by importance weights as in section 4.2 of that paper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import default_data_collator

from hf_bayes.core.number_checks import is_count
from hf_bayes.core.rng import device_of
from hf_bayes.fit.finished_models import batches_by_number, check_rows_and_batch_size
from hf_bayes.members.inputs import without_labels
from hf_bayes.models.classification import BayesianClassifier
from hf_bayes.objectives.label_columns import columns_of
from hf_bayes.uncertainty.decomposition import decompose

Rule = Literal["bald", "batchbald", "entropy", "random"]
RULES: tuple[Rule, ...] = ("bald", "batchbald", "entropy", "random")
_MAX_JOINT = 1024
"""The largest number of configurations of labels that are kept: [configurations, members] numbers."""
_BLOCK = 2**24
"""The largest number of float64 numbers of a temporary tensor: 128 MB."""


def acquire(
    model: BayesianClassifier,
    pool: Any,
    k: int,
    *,
    by: Rule = "bald",
    collate: Callable[..., Any] | None = None,
    batch_size: int = 32,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Return the numbers of ``k`` rows to label, the most informative first.

    The rules compare the members' own predictions, without a temperature of the mixture, whatever way the model
    predicts in.

    Args:
        model: a Bayesian classifier of inputs with one class each.
        pool: rows; their labels and weights, if any, are not read.
        k: the number of rows.
        by: one of ``RULES``.
        collate: rows -> a batch of tensors; None is transformers' default collator.
        batch_size: rows of a forward pass.
        generator: as in ``select_rows``.
    Raises:
        ValueError: as ``select_rows`` (before the first forward pass), and for a model of another kind.
    """
    check_rows_and_batch_size("acquire", "pool", pool, batch_size)
    _check(len(pool), k, by)
    if by == "random":
        return select_rows(torch.zeros(1, len(pool), 1), k, by=by, generator=generator)
    if not isinstance(model, BayesianClassifier) or not model.likelihood.predicts_classes:
        raise ValueError(f"acquire needs a Bayesian classifier with one class for each input, got {model!r:.100}")
    _require_members(model.num_members, by)
    found, collate = [], collate or default_data_collator
    columns = columns_of(model.likelihood)
    with torch.no_grad():
        for batch in batches_by_number(pool, range(len(pool)), model=model, collate=collate, batch_size=batch_size):
            found.append(model.member_logits(without_labels(batch, columns)).cpu())
    return select_rows(torch.cat(found, 1), k, by=by, generator=generator)


def select_rows(logits: Tensor, k: int, *, by: Rule = "bald", generator: torch.Generator | None = None) -> list[int]:
    """Return the numbers of ``k`` of N rows, given the logits [M, N, C] of the members.

    Args:
        by: one of ``RULES``.
        generator: draws for "random", and for "batchbald" with many labels; None is torch's global generator.
    Raises:
        ValueError: for an unknown rule, more rows than there are, and one member with "bald" or "batchbald".
    """
    if logits.ndim != 3:
        raise ValueError(f"logits must be [members, rows, classes], got {list(logits.shape)}")
    num_rows = logits.shape[1]
    _check(num_rows, k, by)
    _require_members(len(logits), by)
    if by == "random":
        return torch.randperm(num_rows, generator=generator, device=device_of(generator))[:k].tolist()
    if by == "batchbald":
        return _batchbald(logits.double().softmax(-1), k, generator)
    parts = decompose(logits)
    values = parts.total if by == "entropy" else parts.epistemic
    return values.sort(descending=True, stable=True).indices[:k].tolist()


def _check(num_rows: int, k: int, by: str) -> None:
    if by not in RULES:
        raise ValueError(f"unknown rule {by!r}: expected one of {', '.join(RULES)}")
    if not is_count(k) or k > num_rows:
        raise ValueError(f"k is the number of rows to choose, an integer from 1 to the pool's {num_rows}, got {k!r}")


def _require_members(num_members: int, by: str) -> None:
    """Raise for one member and a rule of mutual information, which is 0 for one member up to rounding."""
    if by in ("bald", "batchbald") and num_members < 2:
        raise ValueError(
            f"by={by!r} chooses rows on which members disagree, and needs at least 2 members, got {num_members}: load "
            "the posterior with more members, or choose by='entropy'. A distilled student is one network: sort the "
            "rows by the `epistemic` that it returns, or load the posterior without prediction='distilled'"
        )


def _batchbald(probs: Tensor, k: int, generator: torch.Generator | None) -> list[int]:
    """Return rows that greedily maximise the joint mutual information, for probabilities [M, N, C]."""
    conditional = torch.special.entr(probs).sum(-1).mean(0)  # [N]
    joint = probs.new_ones(1, len(probs))  # [J, M]: p_m of each configuration of the chosen labels
    weights = probs.new_ones(1)  # [J]: each configuration stands for so many
    chosen: list[int] = []
    while True:
        gain = _joint_entropy(joint, weights, probs) - conditional
        gain[chosen] = -torch.inf
        chosen.append(int(gain.argmax()))
        if len(chosen) == k:
            return chosen
        joint = torch.einsum("jm,mc->jcm", joint, probs[:, chosen[-1]]).flatten(0, 1)
        weights = weights.repeat_interleave(probs.shape[-1])
        joint, weights = _thinned(joint, weights, generator)


def _joint_entropy(joint: Tensor, weights: Tensor, probs: Tensor) -> Tensor:
    """Return [N]: the entropy of the chosen labels together with the label of each row."""
    num_members, num_rows, num_classes = probs.shape
    found, size = [], max(1, _BLOCK // (len(joint) * num_classes))
    for start in range(0, num_rows, size):
        q = torch.einsum("jm,mnc->njc", joint, probs[:, start : start + size]) / num_members
        found.append((torch.special.entr(q).sum(-1) * weights).sum(-1))
    return torch.cat(found)


def _thinned(joint: Tensor, weights: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Return at most ``_MAX_JOINT`` configurations, drawn by their probability; weights keep sums unbiased."""
    if len(joint) <= _MAX_JOINT:
        return joint, weights
    mass = joint.mean(1) * weights
    mass = mass / mass.sum()
    drawn = torch.multinomial(mass.to(device_of(generator)), _MAX_JOINT, replacement=True, generator=generator)
    drawn = drawn.to(mass.device)
    return joint[drawn], weights[drawn] / (mass[drawn] * _MAX_JOINT)
