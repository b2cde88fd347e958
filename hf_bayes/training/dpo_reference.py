"""The parts of TRL's DPOTrainer that we fill in: its reference model, and the log-probabilities that this model gives.

DPOTrainer loads a second copy of the base as its reference, unless it gets a peft model, and a model with a member axis
is none. So it gets a stand-in, which holds no weights. The reference log-probabilities come from the model itself, at
the weights before the first update. For a fresh adapter these are the base with the adapter off.

``members.compat.trl`` lists the names of DPOTrainer that are used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_bayes.members.compat import trl
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.preferences import BayesianModelForPreferences
from hf_bayes.training.data.preferences import as_trl_batch, pairs_of


class StandIn(nn.Module):
    """A reference model without weights of its own. DPOTrainer names it, hashes its state, and never runs it.

    Args:
        model: attached, with its reference weights.
    """

    def __init__(self, model: BayesianModelForPreferences) -> None:
        super().__init__()
        self._of = (model,)  # in a tuple, so that it is no submodule
        self.config = model.config

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the weights that determine the reference log-probabilities, because TRL stores these in a cache."""
        model = self._of[0]
        return {**model.core.state_dict(), "reference": model.reference}

    def forward(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a stand-in is never run")


@contextmanager
def reference_given(trainer: Any, model: BayesianModel, kwargs: dict[str, Any]) -> Iterator[None]:
    """Make a DPOTrainer in the block; afterwards the model has its reference. Other trainers are not changed.

    Args:
        trainer: not yet initialised.
        model: attached; its reference weights are known.
        kwargs: for the ``__init__`` of DPOTrainer; a stand-in is added if there is no reference model.
    """
    if not isinstance(model, BayesianModelForPreferences) or not trl.computes_reference(trainer):
        yield
        return
    own = kwargs.get(trl.REFERENCE_ARGUMENT)
    if own is None:
        kwargs[trl.REFERENCE_ARGUMENT] = StandIn(model)

        def compute_ref_log_probs(_: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
            """Return log p_ref of the preferred answers, and of the others."""
            with torch.no_grad():
                first, second = model.reference_log_probs(pairs_of(inputs, len(inputs["input_ids"]) // 2)).unbind(1)
            return first.float(), second.float()

        trl.replace_reference_log_probs(trainer, compute_ref_log_probs)
    before = vars(model).get("forward")
    try:
        yield
    finally:
        # TRL puts a forward with a fused head on the model, which would hide ours
        if vars(model).get("forward") is not before:
            del model.forward
    if own is not None and not trl.precomputes_reference(trainer):

        def of_other(inputs: dict[str, Any]) -> Tensor:
            """Return log p_ref [B, 2] of the reference model that the user gave."""
            return torch.stack(trl.reference_log_probs(trainer, as_trl_batch(inputs)), 1)

        model.other_reference = of_other
