"""The names of TRL's DPOTrainer that ``training.dpo_reference`` fills in or reads.

TRL is no dependency, and it is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_bayes.core.compat import PrivateName

REFERENCE_ARGUMENT = "ref_model"
"""The argument of DPOTrainer for its reference model."""

_DPO = "trl.DPOTrainer"

NAMES = (
    PrivateName(f"{_DPO}.__init__", REFERENCE_ARGUMENT, None, "argument"),
    PrivateName(_DPO, "compute_ref_log_probs", ("model", "inputs"), "replaced"),
    PrivateName(_DPO, "ref_model", None, "read"),
    PrivateName(_DPO, "precompute_ref_logps", None, "read"),
)
"""The names of DPOTrainer."""


def computes_reference(trainer: Any) -> bool:
    """Check whether a trainer computes log-probabilities of a reference model, as DPOTrainer does."""
    return hasattr(trainer, "compute_ref_log_probs")


def replace_reference_log_probs(trainer: Any, compute: Callable[[Any, dict[str, Any]], tuple[Tensor, Tensor]]) -> None:
    """Replace the function with which a DPOTrainer computes the log-probabilities of its reference model."""
    trainer.compute_ref_log_probs = compute


def reference_log_probs(trainer: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return log p_ref of the preferred answers, and of the rejected ones, by the trainer's own reference model."""
    first, second = trainer.compute_ref_log_probs(trainer.ref_model, inputs)
    return first, second


def precomputes_reference(trainer: Any) -> bool:
    """Check whether a DPOTrainer computes the log-probabilities of its reference model before training."""
    return bool(trainer.precompute_ref_logps)
