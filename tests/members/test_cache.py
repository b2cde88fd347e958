from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_bayes.members.cache import merge_caches, mergeable, reorder_cache
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
    merged = merge_caches(None, [filled([2, 4]), filled([2, 2], start=4)], num_trunk=1)
    assert numbers(merged) == [[0, 1], [0, 1, 2, 3, 4, 5]]


def test_only_empty_plain_caches_are_pieced_together() -> None:
    sliding = tiny_llama(sliding_window=4, layer_types=["sliding_attention"] * 2).config
    assert mergeable(DynamicCache())
    assert not mergeable(filled([2]))
    assert not mergeable(StaticCache(config=tiny_llama().config, max_cache_len=4))
    assert not mergeable(DynamicCache(config=sliding))
