"""The level of the scores that ``generate`` gives to penalties, which act on logits and not on probabilities."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    ExponentialDecayLengthPenalty,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.logits_process import EncoderRepetitionPenaltyLogitsProcessor

from hf_bayes.models.language.token_uncertainty import GenerationTrace
from hf_bayes.uncertainty.likelihoods import widened

_MULTIPLY = (
    RepetitionPenaltyLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
)
"""The processors of transformers that multiply scores. A constant that is added to all scores changes no other."""


class AtLevelOfLogits(LogitsProcessor):
    """Raise the mixture's log-probabilities to the level of logits: by the members' mean log-sum-exp of logits.

    A softmax does not depend on the level of its logits, but a penalty does. The penalty on repetition divides a
    positive logit and multiplies a negative one. All log-probabilities are negative, and that of a token that is nearly
    certain is near 0: a penalty would hardly change it, and a loop would go on. With one member, the raised scores are
    the logits of the plain model.

    Args:
        trace: the record of the ``generate`` that runs, with the members' logits of the current step.
        temperature: the temperature of the mixture.
    """

    def __init__(self, trace: GenerationTrace, temperature: float) -> None:
        self.trace, self.temperature = trace, temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        levels = [(widened(logits) / self.temperature).logsumexp(-1) for _, logits in self.trace.pending]  # [M, n] each
        level: Tensor = self.trace.group.mean(torch.cat(levels, 1))
        return scores + level[:, None].to(scores)


def at_level_of_logits(
    processors: LogitsProcessorList, trace: GenerationTrace, temperature: float
) -> LogitsProcessorList:
    """Return the processors of ``generate``, after ``AtLevelOfLogits`` if one of them depends on the level of logits.

    Args:
        processors: all processors of this call.
        trace, temperature: as for ``AtLevelOfLogits``.
    """
    if not any(isinstance(processor, _MULTIPLY) for processor in processors):
        return processors
    return LogitsProcessorList([AtLevelOfLogits(trace, temperature), *processors])
