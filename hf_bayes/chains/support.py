"""The exceptions of an energy that mean that the density is 0 at theta."""

from __future__ import annotations

import numpy as np
import torch

OUTSIDE_SUPPORT = (torch.linalg.LinAlgError, np.linalg.LinAlgError, ArithmeticError)  # type: ignore[attr-defined]
"""Exceptions that mean that the density is 0 at theta, beside those of constraints in ``torch.distributions``."""


def is_outside_support(error: Exception) -> bool:
    """Return whether an exception of an energy means that theta lies outside the support."""
    if isinstance(error, OUTSIDE_SUPPORT):
        return True
    if not isinstance(error, ValueError) or error.__traceback__ is None:
        return False
    raised_in = error.__traceback__
    while raised_in.tb_next is not None:
        raised_in = raised_in.tb_next
    return str(raised_in.tb_frame.f_globals.get("__name__", "")).startswith("torch.distributions")
