"""The package Pyro, whose samplers some experiments compare with. It is installed only for them."""

from __future__ import annotations

from typing import Any


def require_pyro() -> Any:
    """Return Pyro, or raise an error that names the package to install."""
    try:
        import pyro
        import pyro.infer
    except ImportError as error:
        raise ImportError(
            'NUTS and MALA are Pyro\'s, which is not installed: pip install "hf-bayes[reproduce]" (pyro-ppl), or run '
            "scripts.reproduce.agps_targets with --baselines 0, without them"
        ) from error
    return pyro
