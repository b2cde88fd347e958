from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_bayes.core.types import Evaluation
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs
from tests.tiny_models import tiny_llama, with_lora
from tests.training.trained import Stream, full_data, relative


def build() -> Any:
    return with_lora(tiny_llama(dtype=torch.float64))


def require_scaled(
    evaluations: list[Evaluation], updates: list[list[dict[str, Any]]], trainer: BayesianTrainer
) -> None:
    """Check that each update has the log-likelihood of its own rows, scaled to the 1000 terms of the stream."""
    for found, rows in zip(evaluations, updates, strict=True):
        terms = sum(len(row["labels"]) - 1 for row in rows)
        expected = full_data(build, trainer, rows)
        torch.testing.assert_close(found.log_lik, 1000 / terms * expected.log_lik, rtol=1e-6, atol=0)
        assert relative(found.grad_log_lik, 1000 / terms * expected.grad_log_lik) < 1e-6


def test_a_stream_trains_on_its_rows_in_order_scaled_to_num_data(tmp_path, evaluations):
    rows = runs.token_rows([8, 20, 8, 6, 9])
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        model=build(),
        train=Stream(rows),
        collator=runs.padding_collator(),
        minibatch="shared",
        num_data=1000.0,
        max_steps=3,
    )
    trainer.train()
    # the fifth row fills no batch: after the first two the stream begins again
    require_scaled(evaluations, [rows[:2], rows[2:4], rows[:2]], trainer)


def test_a_stream_that_was_mapped_loses_the_columns_not_taken(tmp_path):
    def named(row):
        return row | {"name": "x"}

    stream = Dataset.from_list(runs.token_rows(6)).to_iterable_dataset().map(named)
    assert stream.column_names is None
    trainer = runs.trainer(tmp_path, MAPConfig(), train=stream, minibatch="shared", num_data=50.0, map_updates=0)
    assert set(trainer.rows.first()) == {"input_ids", "attention_mask", "labels"}


def test_each_stream_update_is_scaled_by_its_own_micro_batches(tmp_path, evaluations):
    rows = runs.token_rows([8, 20, 8, 6, 9, 12, 30])
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        model=build(),
        train=Stream(rows),
        minibatch="shared",
        num_data=1000.0,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
        max_steps=5,
    )
    trainer.train()
    # the seventh row is no update: its gradient is in none
    require_scaled(evaluations, [rows[:3], rows[3:6], rows[:3], rows[3:6], rows[:3]], trainer)


class Shuffled(Stream):
    """A stream with the number of its pass, which transformers sets on data sets that shuffle."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rng = torch.Generator().manual_seed(self.epoch)
        yield from (self.rows[i] for i in torch.randperm(len(self.rows), generator=rng))


class Drawing(Stream):
    """Draws as it goes from a ``generator`` of its own, which transformers seeds anew for every pass."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__(rows)
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in self.rows:
            yield self.rows[int(torch.randint(len(self.rows), (), generator=self.generator))]


STREAMS = {
    "in order": Stream,
    "set_epoch": Shuffled,
    "generator": Drawing,
    "datasets": lambda rows: Dataset.from_list(rows).to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=4),
}


def of_a_stream(folder: Path, kind: str, seen: list[list[int]], **changes: Any) -> BayesianTrainer:
    """A run that notes the first token of every row of each update; its probe looks in the middle of a pass."""
    fields: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "probe_steps": 5, "max_steps": 9}
    trainer = runs.trainer(
        folder,
        SGHMCConfig(num_chains=2, draws_per_chain=2),
        train=STREAMS[kind](runs.token_rows(20)),
        minibatch="shared",
        num_data=1000.0,
        **(fields | changes),
    )
    take = trainer.get_batch_samples

    def note(*args: Any) -> Any:
        batches, terms = take(*args)
        seen.append([int(row[0]) for batch in batches for row in batch["input_ids"]])
        return batches, terms

    trainer.get_batch_samples = note
    return trainer


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("done", [2, 5])
def test_a_resumed_stream_goes_on_where_it_was(tmp_path, accumulation, kind, done):
    """A stream has 20 rows in updates of 8, or of 6 in three batches. Two updates end in its first pass or at its end.

    Five updates end in a later pass, after an evaluation of the probe.
    """
    size, shown, again = {1: 8, 3: 2}[accumulation], [], []
    changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    whole = of_a_stream(tmp_path, kind, shown, **changes)
    whole.train()
    resumed = of_a_stream(tmp_path / "resumed", kind, again, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{done}"))
    assert again == shown[done:]
    assert runs.equal(resumed.posterior.approximation, whole.posterior.approximation)
    assert torch.equal(resumed.monitor.probes[-1], whole.monitor.probes[-1])


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_is_told_which_pass_it_is_in(tmp_path, kind):
    shown: list[list[int]] = []
    of_a_stream(tmp_path, kind, shown, save_strategy="no", max_steps=30).train()
    passes = [list(itertools.chain(*shown[i : i + 10])) for i in (0, 10, 20)]
    assert (passes[0] == passes[1] == passes[2]) == (kind == "in order")
    if kind != "generator":  # which repeats rows
        assert all(sorted(rows) == sorted(passes[0]) for rows in passes)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["set_epoch", "datasets"])
def test_workers_show_each_row_of_a_stream_once_in_a_pass(tmp_path, kind, persistent):
    """Three shards for two workers: one of them has twice the rows of the other."""
    shown: list[list[int]] = []
    workers = {"dataloader_num_workers": 2 if kind == "datasets" else 1, "dataloader_persistent_workers": persistent}
    rows = runs.token_rows(20)
    of_a_stream(
        tmp_path, kind, shown, save_strategy="no", max_steps=40, per_device_train_batch_size=1, **workers
    ).train()
    passes = [list(itertools.chain(*shown[i : i + 20])) for i in (0, 20)]
    assert [sorted(found) for found in passes] == 2 * [sorted(row["input_ids"][0] for row in rows)]
    assert passes[0] != passes[1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (5, r"pass 1 over train_dataset \(Stream\) ended after 2 batches of 2 rows .* takes 3\. Lower"),
        (3, r"pass 1 over train_dataset \(Stream\) ended after 1 batches of 2 rows"),
        (1, r"train_dataset \(Stream\) gave no row, or fewer than per_device_train_batch_size=2"),
        (0, r"train_dataset \(Stream\) gave no row"),
    ],
)
def test_a_stream_of_less_than_an_update_is_refused(tmp_path, rows, message):
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        train=Stream(runs.token_rows(6)[:rows]),
        minibatch="shared",
        num_data=1000.0,
        gradient_accumulation_steps=3,
    )
    trainer.get_batch_samples = limited(trainer.get_batch_samples)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_stream_that_does_not_begin_again_is_refused(tmp_path):
    class Once(Stream):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            while self.rows:
                yield self.rows.pop()

    trainer = runs.trainer(
        tmp_path, SGHMCConfig(), train=Once(runs.token_rows(8)), minibatch="shared", num_data=1000.0, probe_steps=0
    )
    trainer.get_batch_samples = limited(trainer.get_batch_samples)
    with pytest.raises(ValueError, match=r"pass 2 over train_dataset \(Once\) ended after 0 batches .* begin again"):
        trainer.train()


def limited(take: Any) -> Any:
    """Return ``take`` for at most 20 calls: the loop has no other end."""
    left = iter(range(20))

    def checked(*args: Any) -> Any:
        assert next(left, None) is not None, "no update comes of twenty requests"
        return take(*args)

    return checked
