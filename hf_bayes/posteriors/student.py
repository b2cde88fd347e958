"""The distilled student in a posterior's directory: its tensors, and their description in ``posterior_config.json``.

A student belongs to the posterior whose members it imitates. Its description holds the fingerprint of that posterior,
and a student of other members is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_bayes.core.number_checks import is_finite_number, is_integer
from hf_bayes.posteriors.storage.json_types import is_line
from hf_bayes.uncertainty.gaussian_links import PREDICTIONS
from hf_bayes.uncertainty.student_head import head_shapes

STUDENT = "student.safetensors"
DISTILLED = "distilled"
"""The name of the prediction by a student."""
NETWORKS = ("representative", "mean")
"""The networks that a student may read: the one at the root of the directory, or the mean of all stored rows."""
KEYS = ("posterior", "network", "output", "hidden_size", "width", "prediction", "num_members", "num_terms", "report")
"""The keys of ``PosteriorConfig.student``."""
_MAX_SIZE = 1 << 20


def student_shapes(student: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a student, by its description."""
    return head_shapes(student["hidden_size"], student["width"])


def check_description(student: Mapping[str, Any]) -> None:
    """Check the description of a student.

    Raises:
        ValueError: naming the key that is wrong.
    """
    if set(student) != set(KEYS):
        raise ValueError(f"student must have the keys {sorted(KEYS)}, or no keys, got {sorted(student)}")
    prediction, network, report = student["prediction"], student["network"], student["report"]
    fine = {
        "posterior": is_line(student["posterior"]),
        "network": network in NETWORKS,
        "output": is_line(student["output"]),
        "prediction": prediction in list(PREDICTIONS),
        "report": isinstance(report, dict) and all(v is None or is_finite_number(v) for v in report.values()),
        **{name: is_integer(student[name], 1, _MAX_SIZE) for name in ("hidden_size", "width")},
        **{name: is_integer(student[name], 0, 2**63) for name in ("num_members", "num_terms")},
    }
    for name, valid in fine.items():
        if not valid:
            raise ValueError(f"student.{name} is not valid, got {student[name]!r:.100}: distil the posterior again")


def check_student(tensors: Mapping[str, Tensor] | None, student: Mapping[str, Any], fingerprint: str) -> None:
    """Check that a student's tensors fit their description, and that it belongs to this posterior.

    Args:
        fingerprint: the fingerprint of the posterior, in hexadecimal digits.
    Raises:
        ValueError: naming what does not fit.
    """
    if (tensors is None) != (not student):
        what = "no tensors of it" if tensors is None else "tensors of one"
        raise ValueError(f"{STUDENT}: the config has {'a' if student else 'no'} student, and there are {what}")
    if tensors is None:
        return
    if student["posterior"] != fingerprint:
        raise ValueError(
            f"the student was distilled from other members (posterior {student['posterior'][:12]}) than this posterior "
            f"has ({fingerprint[:12]}): call hf_bayes.distil with this posterior, or leave the student out"
        )
    expected = student_shapes(student)
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if found != expected or any(value.dtype != torch.float32 for value in tensors.values()):
        raise ValueError(f"{STUDENT} has tensors {found}, expected {expected} in float32: distil the posterior again")
