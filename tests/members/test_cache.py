from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_bayes.members.cache import empty_like, merge_caches, mergeable, reorder_cache
from tests.members.subjects import gemma2
from tests.models import tiny_llama


def filled(rows: list[int], start: int = 0) -> DynamicCache:
    """A layer for each entry, whose row r holds the number start + r."""
    cache = DynamicCache()
    for layer, count in enumerate(rows):
        states = (start + torch.arange(count, dtype=torch.float32))[:, None, None, None].expand(count, 1, 2, 1)
        cache.update(states.clone(), states.clone(), layer)
    return cache


def numbers(cache: DynamicCache) -> list[list[int]]:
    return [layer.keys[:, 0, 0, 0].int().tolist() for layer in cache.layers]


def test_beams_permute_rows_of_the_trunk_and_rows_of_all_members_elsewhere() -> None:
    cache = reorder_cache(filled([3, 6]), torch.tensor([2, 0, 0]), num_members=2, num_trunk=1)
    assert numbers(cache) == [[2, 0, 0], [2, 0, 0, 5, 3, 3]]


def test_a_layer_with_other_rows_is_refused_when_beams_permute() -> None:
    # transformers would index the first rows, and silently drop members
    with pytest.raises(ValueError, match="layer 0 of the cache has 6 rows, expected 3"):
        reorder_cache(filled([6, 6]), torch.tensor([2, 0, 0]), num_members=2, num_trunk=1)


def test_caches_of_groups_of_members_are_pieced_together() -> None:
    merged = merge_caches(DynamicCache(), [filled([2, 4]), filled([2, 2], start=4)], num_trunk=1)
    assert numbers(merged) == [[0, 1], [0, 1, 2, 3, 4, 5]]


def test_pieces_of_a_window_know_how_far_it_has_slid() -> None:
    config = gemma2(torch.float32).config  # a sliding layer, window 4, and a full one
    target, parts = DynamicCache(config=config), []
    for start in (0, 1):
        part = empty_like(target)
        for layer in range(2):
            states = start + torch.arange(6.0).view(1, 1, 6, 1)
            part.update(states, states, layer)
        parts.append(part)
    merged = merge_caches(target, parts, num_trunk=0)
    assert merged is target
    assert [layer.keys.flatten(1).int().tolist() for layer in merged.layers] == [
        [[3, 4, 5], [4, 5, 6]],
        [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]],
    ]
    assert [layer.get_seq_length() for layer in merged.layers] == [6, 6]


def test_only_empty_dynamic_caches_are_pieced_together() -> None:
    sliding = tiny_llama(sliding_window=4, layer_types=["sliding_attention"] * 2).config
    assert mergeable(DynamicCache())
    assert mergeable(DynamicCache(config=sliding))
    assert mergeable(DynamicCache(config=gemma2(torch.float32).config))
    assert not mergeable(filled([2]))
    assert not mergeable(StaticCache(config=tiny_llama().config, max_cache_len=4))
    assert not mergeable(None)
