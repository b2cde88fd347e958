"""The random parameters that a variational method learns as points, by their names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from hf_bayes.core.types import UNNAMED


def check_expression(method: str, points: str | None) -> None:
    """Raise a ValueError unless ``points`` is a regular expression or None."""
    if points is None:
        return
    try:
        re.compile(points)
    except (TypeError, re.error) as error:
        raise ValueError(f"{method}: points must be a regular expression, got {points!r}: {error}") from error


def random_elements(method: str, points: str | None, shapes: Mapping[str, tuple[int, ...]]) -> Tensor | None:
    """Return [d] bool, False for elements of tensors whose names match ``points``; None if all are random.

    Raises:
        ValueError: if ``points`` matches no name or all names, or there are no names.
    """
    if points is None:
        return None
    if UNNAMED in shapes:
        raise ValueError(
            f"{method}: points={points!r} names random parameters, and theta is one tensor without names here: leave "
            "it out"
        )
    chosen = {name: re.search(points, name) is not None for name in shapes}
    if not any(chosen.values()):
        raise ValueError(
            f"{method}: points={points!r} matches no random parameter ({', '.join(list(shapes)[:3])}, ...): add LoRA, "
            "or name some of them"
        )
    if all(chosen.values()):
        raise ValueError(
            f"{method}: points={points!r} matches all random parameters, and nothing is left to be random: name fewer, "
            'or use method="map"'
        )
    sizes = torch.tensor([math.prod(shape) for shape in shapes.values()])
    return ~torch.tensor(list(chosen.values())).repeat_interleave(sizes)
