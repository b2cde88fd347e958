from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader

from hf_bayes.objectives.batches import ChainBatches, FullPasses, WholeUpdates


def batches(num_rows=10, *, batch_size=2, accumulation=3, chains: range | None = range(3), seed=0, **share):
    return ChainBatches(num_rows, batch_size=batch_size, accumulation=accumulation, chains=chains, seed=seed, **share)


def read(sampler, epochs=1):
    """The micro-batches of some epochs."""
    found = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        found += list(sampler)
    return found


def stream(micro_batches, chain, *, num_chains, batch_size):
    """The rows of one chain, in order."""
    assert all(len(micro) == num_chains * batch_size for micro in micro_batches)
    return [row for micro in micro_batches for row in micro[chain * batch_size : (chain + 1) * batch_size]]


def test_stream_of_a_chain_is_a_function_of_seed_and_chain_alone():
    of_three = read(batches(), epochs=4)
    for chain in range(3):
        alone = read(batches(chains=range(chain, chain + 1)), epochs=4)
        expected = stream(of_three, chain, num_chains=3, batch_size=2)
        assert stream(alone, 0, num_chains=1, batch_size=2) == expected
    assert read(batches(), epochs=4) == of_three
    assert read(batches(seed=1), epochs=4) != of_three


def test_the_stream_does_not_depend_on_micro_batch_sizes():
    rows = {
        (size, accumulation): stream(
            read(batches(batch_size=size, accumulation=accumulation, chains=range(1)), epochs=3),
            0,
            num_chains=1,
            batch_size=size,
        )
        for size, accumulation in ((6, 1), (3, 2), (2, 3), (1, 6))
    }
    assert len({tuple(value) for value in rows.values()}) == 1


def test_chains_read_different_orders():
    found = read(batches())
    assert len({tuple(stream(found, chain, num_chains=3, batch_size=2)) for chain in range(3)}) == 3


@pytest.mark.parametrize(("num_rows", "accumulation"), [(10, 3), (7, 3), (3, 4), (12, 2), (1, 1)])
def test_every_permutation_holds_every_row_once(num_rows, accumulation):
    rows = stream(read(batches(num_rows, accumulation=accumulation), epochs=20), 1, num_chains=3, batch_size=2)
    permutations = [rows[start : start + num_rows] for start in range(0, len(rows) - num_rows + 1, num_rows)]
    assert all(sorted(order) == list(range(num_rows)) for order in permutations)
    if num_rows > 5:
        assert all(a != b for a, b in pairwise(permutations))


def test_update_s_takes_rows_s_r_to_s_plus_one_r_of_the_stream():
    sampler = batches()  # 6 rows an update, 2 updates an epoch of 10 rows
    assert sampler.updates_per_epoch == 2
    assert len(sampler) == 6
    whole = stream(read(sampler, epochs=5), 2, num_chains=3, batch_size=2)
    sampler.set_epoch(3)
    assert stream(list(sampler), 2, num_chains=3, batch_size=2) == whole[3 * 12 : 4 * 12]


def test_epochs_can_be_read_again_and_out_of_order():
    expected = read(batches(), epochs=6)
    sampler = batches()
    for epoch in (5, 0, 3, 3):
        sampler.set_epoch(epoch)
        assert list(sampler) == expected[epoch * 6 : epoch * 6 + 6]


def test_shared_minibatches_hold_each_row_once():
    shared = read(batches(chains=None), epochs=2)
    assert all(len(micro) == 2 for micro in shared)
    rows = [row for micro in shared for row in micro]
    assert sorted(rows[:10]) == list(range(10))


@pytest.mark.parametrize(("order", "period"), [("independent", 2), ("disjoint", 6)])
def test_redrawn_rows_are_distinct_in_a_batch_and_uniform(order, period):
    rows = stream(read(batches(order=order), epochs=1000), 1, num_chains=3, batch_size=2)
    draws = [rows[start : start + period] for start in range(0, len(rows), period)]
    assert all(len(set(draw)) == period for draw in draws)
    assert any(set(a) & set(b) for a, b in pairwise(draws))  # twin: with epochs of 10 rows, 2 and 2 never meet
    counts = torch.bincount(torch.tensor(rows), minlength=10).double() / len(draws)
    # a row is in a draw with probability period / 10: 4.5 standard errors
    assert (counts - period / 10).abs().max() < 4.5 * (period / 10 * (1 - period / 10) / len(draws)) ** 0.5


def test_redrawn_batches_do_not_depend_on_num_processes():
    whole = read(batches(batch_size=2, accumulation=4, order="independent"), epochs=2)
    parts = [
        read(batches(batch_size=2, accumulation=2, order="independent", data_rank=rank, data_size=2), epochs=2)
        for rank in (0, 1)
    ]
    assert [batch for pair in zip(*parts, strict=True) for batch in pair] == whole


@pytest.mark.parametrize(("order", "rows"), [("independent", 11), ("disjoint", 12)])
def test_more_distinct_rows_than_there_are_are_refused(order, rows):
    size, accumulation = (11, 1) if order == "independent" else (2, 6)
    with pytest.raises(ValueError, match=f"order='{order}' cannot draw {rows} different rows of 10"):
        batches(batch_size=size, accumulation=accumulation, order=order)


def test_full_passes_hold_all_rows_in_order_every_time():
    sampler = FullPasses(7, batch_size=3)
    assert len(sampler) == 3
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert list(sampler) == [[0, 1, 2], [3, 4], [5, 6]]


def test_processes_with_shared_chains_split_each_updates_rows():
    whole = read(batches(batch_size=4, accumulation=1), epochs=3)
    parts = [read(batches(batch_size=2, accumulation=1, data_rank=rank, data_size=2), epochs=3) for rank in (0, 1)]
    for chain in range(3):
        expected = stream(whole, chain, num_chains=3, batch_size=4)
        halves = [stream(part, chain, num_chains=3, batch_size=2) for part in parts]
        for first in range(0, len(expected), 4):
            half = slice(first // 2, first // 2 + 2)
            assert [*halves[0][half], *halves[1][half]] == expected[first : first + 4]


@pytest.mark.parametrize(("size", "accumulation", "processes"), [(6, 1, 1), (2, 3, 1), (1, 6, 1), (3, 1, 2), (1, 3, 2)])
def test_rows_of_a_stream_update_do_not_depend_on_batch_sizes(size, accumulation, processes):
    """A pass of 20 rows has three updates of 6."""
    parts = []
    for rank in range(processes):
        turns = IterableDatasetShard(
            range(20), batch_size=size, drop_last=True, num_processes=processes, process_index=rank
        )
        loader = DataLoader(turns, batch_size=size, drop_last=True, collate_fn=list)
        updates = iter(WholeUpdates(loader, accumulation, name="rows"))
        parts.append([list(itertools.chain(*itertools.islice(updates, accumulation))) for _ in range(7)])
    for number, update in enumerate(zip(*parts, strict=True)):
        first = 6 * (number % 3)
        assert sorted(itertools.chain(*update)) == list(range(first, first + 6))


def test_a_stream_says_which_update_it_reads_next():
    """A pass of five batches has two updates, and the begin of a third that the next pass makes."""
    loader = DataLoader(IterableDatasetShard(range(10), batch_size=2), batch_size=2)
    seen: list[int] = []
    updates = iter(WholeUpdates(loader, 2, name="rows", before_update=seen.append))
    for number, expected in enumerate(([0], [0, 1], [0, 1, 2, 2], [0, 1, 2, 2, 3], [0, 1, 2, 2, 3, 4, 4])):
        assert len(list(itertools.islice(updates, 2))) == 2, number
        assert seen == expected


def test_full_passes_of_several_processes_hold_all_rows_once():
    parts = [list(FullPasses(10, batch_size=2, data_rank=rank, data_size=3)) for rank in range(3)]
    assert {len(part) for part in parts} == {2}
    assert sorted(row for part in parts for batch in part for row in batch) == list(range(10))
    with pytest.raises(ValueError, match="7 rows cannot give 3 processes 3 batches each"):
        FullPasses(7, batch_size=1, data_rank=0, data_size=3)


def test_two_permutations_of_ten_rows_are_uniform_in_first_place():
    first = torch.tensor([batches(chains=range(1), seed=seed)._row(0, 0) for seed in range(2000)])
    counts = torch.bincount(first, minlength=10).double()
    # chi-square of 9 degrees of freedom: 33.7 is exceeded with probability 1e-4
    assert float(((counts - 200) ** 2 / 200).sum()) < 33.7


def test_epochs_may_be_given() -> None:
    batches = ChainBatches(
        9, batch_size=2, accumulation=2, chains=range(1), seed=0, order="independent", updates_per_epoch=5
    )
    assert len(list(batches)) == len(batches) == 10
