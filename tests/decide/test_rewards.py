"""Rewards of texts by a posterior, on members with known rewards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_bayes.decide.rewards import RewardModel, best
from hf_bayes.models.attaching import attach
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from hf_bayes.pipelines.classification import BayesianTextClassificationPipeline
from hf_bayes.uncertainty.custom.bradley_terry import BradleyTerry
from tests.tiny_models import TEXTS, tiny_bert, tiny_tokenizer


@pytest.fixture
def model() -> Any:
    with attach(tiny_bert(num_labels=1), num_members=4, subspace="last_layer", likelihood=BradleyTerry()) as found:
        found.theta.data += torch.randn(found.theta.shape, generator=torch.Generator().manual_seed(0))
        yield found


def test_the_bound_lies_below_the_mean(model: BayesianModelForSequenceClassification) -> None:
    scorer = RewardModel(model, tiny_tokenizer(), bound=2.0)
    members = scorer.member_rewards(TEXTS)
    mean, std, lower = scorer.score(TEXTS)
    assert torch.allclose(mean, members.mean(0))
    assert torch.allclose(std, members.std(0, correction=0), atol=1e-6)
    assert torch.allclose(lower, mean - 2 * std)


def test_a_batch_does_not_change_rewards(model: BayesianModelForSequenceClassification) -> None:
    one, all_ = (RewardModel(model, tiny_tokenizer(), batch_size=size).score(TEXTS).mean for size in (1, 4))
    # padded rows, float32
    assert torch.allclose(one, all_, atol=1e-5)


def test_reference_texts_remove_the_constants_of_members(model: BayesianModelForSequenceClassification) -> None:
    scorer = RewardModel(model, tiny_tokenizer(), reference=TEXTS)
    before = scorer.score(TEXTS)
    names = model.layout.named_shapes
    bias = list(names).index(next(name for name in names if name.endswith("bias")))
    column = sum(model.layout.sizes[:bias])
    model.theta.data[:, column] += torch.tensor([5.0, -5.0, 9.0, 0.0])  # a constant for each member
    after = RewardModel(model, tiny_tokenizer(), reference=TEXTS).score(TEXTS)
    assert torch.allclose(before.std, after.std, atol=1e-5)
    assert float(RewardModel(model, tiny_tokenizer()).score(TEXTS).std.min()) > 3


def test_the_bound_avoids_what_members_disagree_on() -> None:
    # the second candidate has the larger mean reward, and one member gives it a very low one
    rewards = torch.tensor([[1.0, 4.0, 0.0], [1.0, -1.5, 0.0], [1.0, 1.5, 0.0]])
    assert best(rewards, by="mean", bound=1.0) == 1
    assert best(rewards, by="lower", bound=1.0) == 0


def test_a_constant_of_a_member_does_not_change_the_best() -> None:
    rewards = torch.tensor([[1.0, 2.2], [3.0, 1.4]])
    for constants in ([0.0, 0.0], [-10.0, 10.0], [10.0, -10.0]):
        # without centring, the standard deviations 11 and 9.6 of the second case would choose the second candidate
        assert best(rewards + torch.tensor(constants)[:, None], by="lower", bound=1.0) == 0


def test_best_of_n_returns_a_candidate(model: BayesianModelForSequenceClassification) -> None:
    scorer = RewardModel(model, tiny_tokenizer(), bound=0.0)
    members = scorer.member_rewards(TEXTS)
    assert scorer.best_of_n(TEXTS) == scorer.best_of_n(TEXTS, by="mean") == int(members.mean(0).argmax())


def test_a_reward_function_of_trl_gets_a_number_per_completion(model: BayesianModelForSequenceClassification) -> None:
    scorer = RewardModel(model, tiny_tokenizer())
    found = scorer(prompts=["Say: ", "Say: "], completions=list(TEXTS[:2]), completion_ids=[[1], [2]])
    assert found == pytest.approx(scorer.score(["Say: " + text for text in TEXTS[:2]]).lower.tolist())
    assert scorer.__name__ == "bayesian_reward"
    with pytest.raises(ValueError, match="got 1 prompts and 2 completions"):
        scorer.compute_reward(["a"], ["b", "c"])


def test_what_has_no_meaning_is_refused(model: BayesianModelForSequenceClassification) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="bound is a number of standard deviations"):
        RewardModel(model, tokenizer, bound=-1.0)
    with pytest.raises(ValueError, match="by must be one of mean, lower"):
        RewardModel(model, tokenizer).best_of_n(TEXTS, by="upper")
    with pytest.raises(ValueError, match="needs candidates"):
        RewardModel(model, tokenizer).best_of_n([])
    with (
        attach(tiny_bert(num_labels=3), num_members=2, subspace="last_layer") as classifier,
        pytest.raises(ValueError, match="needs a model with the likelihood of preferences, got Categorical"),
    ):
        RewardModel(classifier, tokenizer)


def test_a_reward_is_no_probability(model: BayesianModelForSequenceClassification) -> None:
    pipe = BayesianTextClassificationPipeline(model=model, tokenizer=tiny_tokenizer())
    with pytest.raises(ValueError, match="a reward is no probability"):
        pipe("A text")
    with pytest.raises(ValueError, match="a reward is no probability"):
        pipe("A text", function_to_apply="sigmoid")
