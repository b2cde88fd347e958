"""Statistics of LM-Polygraph (``lm_polygraph``) from the members of a posterior, so that its estimators run on them.

An estimator of LM-Polygraph is a function of a dictionary of statistics. This example needs the package
``lm-polygraph``::

    from lm_polygraph.estimators import PETmi, MaximumSequenceProbability
    stats = polygraph_stats(generate, prompts, answers)
    PETmi()(stats)                      # the mean EU of each answer's tokens

Its own calculation of the statistics of ensembles is disabled since its version 0.4; the estimators are not. Of the two
ways to average members (Malinin and Gales 2021) "pe" averages the probabilities of each token, as ``generate`` does,
and "ep" those of the whole answer. Each answer is the only beam of its prompt, so beams have the weight 1.

Statistics that need the whole vocabulary at each position are missing: the estimators of reverse mutual information of
tokens (PETrmi, EPTrmi), of expected pairwise KL divergence, and of the entropy of the top words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_bayes.pipelines.continuations import Continuation, read_answers

Array = np.ndarray[Any, Any]


def polygraph_stats(generate: Any, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, Any]:
    """Return the statistics of answers to prompts, by LM-Polygraph's names.

    Args:
        generate: a pipeline of texts with a posterior, ``hf_bayes.pipeline(model=...)``.
        prompts, answers: one answer for each prompt; a space between them belongs to either.
    Returns:
        ``input_texts``, ``greedy_texts``, ``greedy_tokens``; ``greedy_log_likelihoods`` and ``entropy`` of each token,
        of the mixture; and ``ensemble_token_scores`` of the members.
    Raises:
        ValueError: as ``read_answers``, and for no answers.
    """
    if not answers:
        raise ValueError("statistics of an ensemble need answers, got none: give one prompt and one answer or more")
    found = read_answers(generate, prompts, answers)
    scores = [answer.scores for answer in found]
    return {
        "input_texts": list(prompts),
        "greedy_texts": list(answers),
        "greedy_tokens": [answer.ids for answer in found],
        "greedy_log_likelihoods": [each.logprobs.tolist() for each in scores],
        "entropy": [each.total.tolist() for each in scores],
        "ensemble_token_scores": _ensemble(scores),
    }


def _ensemble(scores: Sequence[Continuation]) -> dict[str, Any]:
    """Return the statistics of ensembles, means over tokens: [answers, 1], and [answers, members, 1] for members."""
    means = {
        "total_uncertainty": [each.total.mean().item() for each in scores],
        "data_uncertainty": [each.aleatoric.mean().item() for each in scores],
        "mutual_information": [each.epistemic.mean().item() for each in scores],
    }
    of_beams: dict[str, Array] = {name: np.array(values)[:, None] for name, values in means.items()}
    members = np.stack([each.member_logprobs.mean(-1).numpy() for each in scores])[:, :, None]
    # the same probability for each "member": averaging over tokens first leaves one
    mixture = np.stack([each.logprobs.mean().expand(len(each.member_logprobs)).numpy() for each in scores])[:, :, None]
    return {
        "weights": np.ones((len(scores), 1)),
        "pe_token_level_scores": {**of_beams, "log_probas": mixture},
        "ep_token_level_scores": {"log_probas": members},
        "log_probas": members,
    }
