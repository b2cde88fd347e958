"""The memory of the trunk's output, for rows that come again."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from transformers import DataCollatorForSeq2Seq

from hf_bayes.members.trunk import RowKey, TrunkMemory, row_keys
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests import tiny_models as models
from tests.members.trunk_runs import LAST_BLOCK, Calls
from tests.tiny_models import batch, tiny_llama


def train(folder: object, kind: str, **settings: object) -> tuple[Tensor, int]:
    """Return the final draws of two epochs, and the number of runs of the first block."""
    make, path = LAST_BLOCK[kind]
    model = make(dtype=torch.float64)
    rows = runs.label_rows(6) if kind == "bert" else runs.token_rows(6)
    method = SGHMCConfig(num_chains=2, measure_gradient_noise=False)  # its parts of a batch read rows once more
    trainer = runs.trainer(folder, method, model=model, subspace="last_block", train=rows, max_steps=6, **settings)
    calls = Calls(model.get_submodule(path))
    trainer.train()
    return trainer.posterior.sample(None), calls.count


@pytest.mark.parametrize("kind", LAST_BLOCK)
@pytest.mark.parametrize("minibatch", ["shared", "independent"])
def test_rows_that_come_again_find_the_trunks_output_in_memory(tmp_path: object, kind: str, minibatch: str) -> None:
    plain, runs_without = train(tmp_path, kind, minibatch=minibatch)
    kept, runs_with = train(tmp_path, kind, minibatch=minibatch, trunk_memory_gib=1.0)
    torch.testing.assert_close(kept, plain, rtol=1e-6, atol=1e-6)  # Llama's norms are float32
    # six updates read six rows per chain twice; with shared rows the second epoch does not run the trunk
    assert runs_with < runs_without
    if minibatch == "shared":
        assert runs_without - runs_with == 3


def test_trunk_memory_keeps_its_budget_and_its_known_rows() -> None:
    memory, (a, b, c, d, e) = TrunkMemory(2 * 4 * 8), (RowKey(name.encode(), None) for name in "abcde")
    hidden = torch.arange(12.0).view(3, 2, 2)
    memory.keep([a, b, c], hidden)
    assert set(memory.rows) == {a, b, c}
    memory.keep([d], torch.zeros(1, 2, 2))
    assert set(memory.rows) == {a, b, c, d}
    memory.keep([e], torch.zeros(1, 2, 2))
    assert e not in memory.rows
    assert torch.equal(memory.find([c, a]), hidden[[2, 0]])
    assert memory.find([a, e]) is None
    other = TrunkMemory(1e6)
    other.keep([a], (torch.zeros(1, 2), torch.zeros(1)))  # an output with more than hidden states
    assert not other.rows


def test_rows_are_told_apart_by_all_that_the_model_is_given() -> None:
    inputs = {**batch(2), "labels": torch.zeros(2, 7)}
    keys = row_keys(inputs)
    assert row_keys({**inputs, "labels": torch.ones(2, 7)}) == keys
    assert row_keys({k: v[:1] for k, v in inputs.items()}) == keys[:1]
    for name in ("input_ids", "attention_mask"):
        changed = inputs[name].clone()
        changed[1, 3] += 1
        assert [a == b for a, b in zip(row_keys({**inputs, name: changed}), keys, strict=True)] == [True, False]
    assert row_keys({**inputs, "input_ids": inputs["input_ids"].int()}) != keys


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_the_row_key_but_not_the_content_key(side: str) -> None:
    def padded(length: int) -> dict[str, Tensor]:
        (row,) = runs.token_rows([5])
        where = (0, length - 5) if side == "right" else (length - 5, 0)
        return {name: nn.functional.pad(torch.tensor([row[name]]), where) for name in ("input_ids", "attention_mask")}

    ((short,), (long,)) = row_keys(padded(6)), row_keys(padded(8))
    assert short.row != long.row
    assert short.unpadded == long.unpadded
    other = padded(8)
    other["input_ids"][other["attention_mask"] == 1] += 1
    assert row_keys(other)[0].unpadded != long.unpadded
    assert row_keys({"input_ids": torch.ones(1, 4), "of_row": torch.ones(1)})[0].unpadded is None


@pytest.mark.parametrize("fixed", [False, True], ids=["to-the-longest", "to-one-length"])
def test_a_memory_that_padding_makes_useless_says_so_once(tmp_path: object, fixed: bool) -> None:
    """Check sixty rows of sixty lengths, in pairs, for three epochs: few rows are padded to an earlier length."""
    padding = "max_length" if fixed else "longest"
    collator = DataCollatorForSeq2Seq(models.tiny_tokenizer(), padding=padding, max_length=64)
    trainer = runs.trainer(
        tmp_path, SGHMCConfig(num_chains=2), model=tiny_llama(max_position_embeddings=64), subspace="last_block",
        train=runs.token_rows(range(4, 64)), collator=collator, minibatch="shared", max_steps=90, probe_steps=0,
        trunk_memory_gib=1.0, map_updates=0,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    words = [str(warning.message) for warning in told if "trunk_memory_gib" in str(warning.message)]
    assert len(words) == (0 if fixed else 1)
    assert fixed or "padded to another length" in words[0]
