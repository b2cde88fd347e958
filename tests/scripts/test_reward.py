"""The pieces of the experiment on best of n."""

from __future__ import annotations

from itertools import pairwise

import torch

from scripts.reproduce.reward import COUNTS, LENGTH, MOST, VOCABULARY, Gold, chosen, labelled, sequences, values_of


def test_a_quarter_of_the_labels_is_flipped() -> None:
    gold, rng = Gold(0), torch.Generator().manual_seed(0)
    pairs = labelled(gold, 4000, rng, 0.25)
    first, second = gold(pairs.tokens.flatten(0, 1)).view(-1, 2).unbind(1)
    flipped = float((pairs.labels != (second > first)).double().mean())
    assert abs(flipped - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5  # 4 standard errors


def test_the_gold_reward_is_standardised() -> None:
    rewards = Gold(1)(sequences(4000, torch.Generator().manual_seed(7)))
    assert abs(float(rewards.mean())) < 0.1  # 4 standard errors of two means of 4000 are .09
    assert abs(float(rewards.std()) - 1) < 0.1


def test_the_best_of_more_candidates_is_better_in_truth() -> None:
    values = torch.randn(3, MOST, generator=torch.Generator().manual_seed(0))
    found = chosen(values, values)
    assert found[1] == values[:, 0].tolist()
    assert found[MOST] == values.amax(1).tolist()
    assert all(min(found[b][q] - found[a][q] for q in range(3)) >= 0 for a, b in pairwise(COUNTS))


def test_the_bound_removes_constants_of_members() -> None:
    rewards = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0))
    moved = rewards + torch.tensor([1.0, -2.0, 3.0, 0.0])[:, None, None]
    before, after = (values_of(x, x[:1], x[:1])["lower"] for x in (rewards, moved))
    assert torch.allclose(before, after, atol=1e-5)


def test_sequences_have_tokens_of_the_vocabulary() -> None:
    tokens = sequences(5, torch.Generator().manual_seed(0))
    assert tokens.shape == (5, LENGTH)
    assert int(tokens.max()) < VOCABULARY
