from __future__ import annotations

import numpy as np
import pytest

from hf_bayes.pipelines.polygraph import polygraph_stats
from hf_bayes.pipelines.text_generation import BayesianTextGenerationPipeline

PROMPTS = ["A chain that has not", "Langevin"]
ANSWERS = [" moved has not sampled anything.", " dynamics samples"]


def records(generate: BayesianTextGenerationPipeline) -> list[dict[str, dict[str, float]]]:
    return [generate.score(answer, prompt=prompt) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]


def test_statistics_are_those_of_score(generate: BayesianTextGenerationPipeline) -> None:
    stats = polygraph_stats(generate, PROMPTS, ANSWERS)
    for row, record in enumerate(records(generate)):
        tokens = record["tokens"]
        assert stats["greedy_tokens"][row] == [token["id"] for token in tokens]
        # rows that are padded in a batch round otherwise in float32
        assert stats["greedy_log_likelihoods"][row] == pytest.approx([t["logprob"] for t in tokens], abs=1e-5)
        assert stats["entropy"][row] == pytest.approx([t["total"] for t in tokens], abs=1e-5)


def test_members_average_to_the_probability_of_the_answer(generate: BayesianTextGenerationPipeline) -> None:
    scores = polygraph_stats(generate, PROMPTS, ANSWERS)["ensemble_token_scores"]
    lengths = np.array([len(record["tokens"]) for record in records(generate)])
    whole = np.log(np.exp(scores["ep_token_level_scores"]["log_probas"][:, :, 0] * lengths[:, None]).mean(1))
    assert whole == pytest.approx([record["uncertainty"]["sequence_logprob"] for record in records(generate)], rel=1e-5)


def test_each_answer_has_a_prompt(generate: BayesianTextGenerationPipeline) -> None:
    with pytest.raises(ValueError, match="got 2 prompts and 1 answers"):
        polygraph_stats(generate, PROMPTS, ANSWERS[:1])
    with pytest.raises(ValueError, match="need answers, got none"):
        polygraph_stats(generate, [], [])


@pytest.mark.slow
def test_estimators_of_lm_polygraph_find_our_uncertainties(generate: BayesianTextGenerationPipeline) -> None:
    estimators = pytest.importorskip("lm_polygraph.estimators", reason="lm-polygraph is no dependency: make test-doors")
    from lm_polygraph.estimators.ensemble_sequence_measures import EPSrmi, PEStu
    from lm_polygraph.estimators.ensemble_token_measures import PETdu, PETmi, PETtu

    stats, found = polygraph_stats(generate, PROMPTS, ANSWERS), records(generate)
    means = {name: [record["uncertainty"][name] for record in found] for name in ("total", "aleatoric", "epistemic")}
    for estimator, name in ((PETtu, "total"), (PETdu, "aleatoric"), (PETmi, "epistemic")):
        assert estimator()(stats) == pytest.approx(means[name], abs=1e-5)
    lengths = [len(record["tokens"]) for record in found]
    tokenwise = np.array([record["uncertainty"]["sequence_logprob_tokenwise"] for record in found])
    assert estimators.MaximumSequenceProbability()(stats) == pytest.approx(-tokenwise, rel=1e-5)
    assert estimators.Perplexity()(stats) == pytest.approx(-tokenwise / lengths, rel=1e-5)
    assert estimators.MeanTokenEntropy()(stats) == pytest.approx(means["total"], abs=1e-5)
    assert PEStu()(stats) == pytest.approx(-np.exp(tokenwise / lengths), rel=1e-5)
    assert (EPSrmi()(stats) > 0).all()  # Jensen: the members disagree
