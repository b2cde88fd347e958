from __future__ import annotations

import copy
import itertools

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_bayes.members.cache import ROOM, RoomyLayer, empty_like, leave_room, merge_caches, mergeable, reorder_cache
from tests.members.subject_models import gemma2
from tests.tiny_models import tiny_llama


def filled(rows: list[int], start: int = 0) -> DynamicCache:
    """Return a cache with one layer per entry; row r of a layer holds the number start + r."""
    cache = DynamicCache()
    for layer, count in enumerate(rows):
        states = (start + torch.arange(count, dtype=torch.float32))[:, None, None, None].expand(count, 1, 2, 1)
        cache.update(states.clone(), states.clone(), layer)
    return cache


def numbers(cache: DynamicCache) -> list[list[int]]:
    return [layer.keys[:, 0, 0, 0].int().tolist() for layer in cache.layers]


def test_beams_permute_trunk_rows_and_the_rows_of_all_members() -> None:
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


def grown(cache: DynamicCache, lengths: list[int], seed: int = 0) -> DynamicCache:
    """Return one layer to which pieces of these lengths were appended."""
    rng = torch.Generator().manual_seed(seed)
    for length in lengths:
        rows = 2 if not cache.layers or cache.layers[0].get_seq_length() == 0 else cache.layers[0].keys.shape[0]
        keys, values = torch.randn(rows, 3, length, 4, generator=rng), torch.randn(rows, 3, length, 5, generator=rng)
        returned = cache.update(keys, values, 0)
        assert torch.equal(returned[0], cache.layers[0].keys)
        assert torch.equal(returned[1], cache.layers[0].values)
    return cache


def same(a: DynamicCache, b: DynamicCache) -> bool:
    return torch.equal(a.layers[0].keys, b.layers[0].keys) and torch.equal(a.layers[0].values, b.layers[0].values)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: None,
        lambda layer: layer.crop(-3),
        lambda layer: layer.reorder_cache(torch.tensor([1, 1])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices(torch.tensor([1])),
        lambda layer: layer.reset(),
    ],
    ids=["nothing", "crop", "beams", "repeat", "select", "reset"],
)
def test_a_roomy_layer_holds_what_a_dynamic_one_does(change) -> None:
    plain, roomy = grown(DynamicCache(), [7]), leave_room(grown(DynamicCache(), [7]))
    assert type(roomy.layers[0]) is RoomyLayer
    for cache in (plain, roomy):
        grown(cache, [1] * (ROOM + 3), seed=1)  # beyond the first reserved room
        change(cache.layers[0])
        grown(cache, [1, 2, 1], seed=2)
    assert same(plain, roomy)
    assert roomy.get_seq_length() == plain.get_seq_length()


def test_a_roomy_layer_copies_what_it_holds_once_in_a_room() -> None:
    cache = leave_room(grown(DynamicCache(), [7]))
    places = []
    for _ in range(3 * ROOM):
        grown(cache, [1])
        places.append(cache.layers[0].keys.untyped_storage().data_ptr())
    assert sum(a != b for a, b in itertools.pairwise(places)) <= 3


def test_a_copy_of_a_roomy_cache_goes_its_own_way() -> None:
    one = grown(leave_room(grown(DynamicCache(), [7])), [1])
    other = copy.deepcopy(one)
    grown(one, [1, 1], seed=3)
    grown(other, [1], seed=4)
    grown(other, [1], seed=5)
    assert not same(one, other)
    assert same(one, grown(grown(grown(DynamicCache(), [7]), [1]), [1, 1], seed=3))


class Uncertain(torch.Tensor):
    """A tensor that holds more than its values."""


def test_states_of_a_subclass_take_plain_ones_behind_them() -> None:
    cache = leave_room(grown(DynamicCache(), [1]))
    cache.layers[0].keys = cache.layers[0].keys.as_subclass(Uncertain)
    first = cache.layers[0].keys
    grown(cache, [1, 1], seed=1)
    assert type(cache.layers[0].keys) is Uncertain
    assert torch.equal(cache.layers[0].keys[..., :1, :], first)
    assert cache.layers[0].keys.shape[-2] == cache.layers[0].values.shape[-2] == 3


def test_what_autograd_keeps_is_not_written_over() -> None:
    cache = leave_room(grown(DynamicCache(), [7]))
    weight = torch.ones((), requires_grad=True)
    loss = torch.zeros(())
    for _ in range(3):
        keys, values = cache.update(weight * torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1, 5), 0)
        loss = loss + keys.square().sum() + values.sum()
    loss.backward()
    assert weight.grad == 2 * 24 * (1 + 2 + 3)


def test_a_cache_of_inference_mode_grows_outside_of_it() -> None:
    with torch.inference_mode():
        cache = grown(leave_room(grown(DynamicCache(), [7])), [1])
    assert grown(cache, [1]).get_seq_length() == 9


def test_only_plain_layers_are_given_room() -> None:
    windows = DynamicCache(config=gemma2(torch.float32).config)  # a sliding layer and a full one
    assert [type(layer).__name__ for layer in leave_room(windows).layers] == ["DynamicSlidingWindowLayer", "RoomyLayer"]
    static = StaticCache(config=tiny_llama().config, max_cache_len=4)
    assert leave_room(static) is static
    assert not any(isinstance(layer, RoomyLayer) for layer in static.layers)
