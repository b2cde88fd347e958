"""A checkpoint is bound to its run: each thing that changes the target or a method's estimate is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.utils.data import IterableDataset
from transformers import DataCollatorForSeq2Seq

from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.mcmc.penalty import PenaltyConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.run_identity import dropout_of, split_matters
from tests import runs
from tests.tiny_models import tiny_bert, tiny_gpt2, tiny_llama, tiny_tokenizer, with_lora

TEN = runs.token_rows()


class Stream(IterableDataset):
    """Rows in one order, anew in every pass."""

    def __init__(self, seed: int = 0) -> None:
        self.rows = runs.token_rows(40, seed=seed)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(self.rows)


def rescaled(model: Any) -> Any:
    """One layer of a LoRA whose scaling was set by hand."""
    next(module for module in model.modules() if isinstance(module, LoraLayer)).scaling["default"] = 5.0
    return model


def dropping(model: Any) -> Any:
    """A dropout that was set by hand: the configuration does not show it."""
    next(module for module in model.modules() if isinstance(module, nn.Dropout)).p = 0.3
    return model


def padded(length: int) -> Any:
    return DataCollatorForSeq2Seq(tiny_tokenizer(), padding="max_length", max_length=length)


def lengthened(collate: Any) -> Callable[[list[Any]], dict[str, Any]]:
    """A collator that packs the rows of a batch into one."""

    def packed(rows: list[Any]) -> dict[str, Any]:
        return {name: value.reshape(1, -1) for name, value in collate(rows).items()}

    return packed


def lora(**config: Any) -> Callable[[], Any]:
    return lambda: with_lora(tiny_llama(), **config)


TWO_BY_FOUR = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"model": lambda: with_lora(tiny_gpt2(resid_pdrop=0.1))},
    "classifier": {"model": lambda: with_lora(tiny_bert()), "train": runs.label_rows},
    "padded": {"collator": lambda: padded(10)},
    "packed": {"collator": lambda: lengthened(runs.padding_collator()), "minibatch": "shared"},
    "tokenizer": {"processing_class": tiny_tokenizer},
    "given N": {"num_data": 70.0},
    "corrected": {"method": lambda: SGHMCConfig(num_chains=2, correct_gradient_noise=True)},
    "penalty": {"method": lambda: PenaltyConfig(num_chains=2)},
    "stream": {"train": Stream, "minibatch": "shared", "num_data": 500.0},
    "held out": {
        "method": lambda: LaplaceConfig(fit_prior="heldout"),
        "eval_dataset": lambda: runs.token_rows(6, seed=5),
        "map_updates": 0,
    },
}
"""Runs whose checkpoints others try to resume."""

CHANGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "base weights": ("llama", {"model": lambda: with_lora(tiny_llama(seed=1))}, "base.weights: saved '"),
    "base config": (
        "llama",
        {"model": lambda: with_lora(tiny_llama(rms_norm_eps=0.01))},
        "config.rms_norm_eps: saved 1e-06, now 0.01",
    ),
    "rotary base": (
        "llama",
        {"model": lambda: with_lora(tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}))},
        "config.rope_parameters.rope_theta: saved 10000.0, now 500.0",
    ),
    "lora_alpha": ("llama", {"model": lora(lora_alpha=64)}, "adapter.lora_alpha: saved 4, now 64"),
    "rslora": ("llama", {"model": lora(use_rslora=True)}, "adapter.use_rslora: saved False, now True"),
    "scaling": ("llama", {"model": lambda: rescaled(lora()())}, "adapter.scaling: saved [2.0], now [2.0, 5.0]"),
    "lora_dropout": ("llama", {"model": lora(lora_dropout=0.5)}, "adapter.lora_dropout: saved 0.0, now 0.5"),
    "attention dropout": (
        "llama",
        {"model": lambda: with_lora(tiny_llama(attention_dropout=0.5))},
        "self_attn.attention_dropout: saved None, now 0.5",
    ),
    "dropout set by hand": (
        "gpt2",
        {"model": lambda: dropping(with_lora(tiny_gpt2(resid_pdrop=0.1)))},
        "transformer.drop: saved None, now 0.3",
    ),
    "rows of equal number": ("llama", {"train": lambda: runs.token_rows(seed=1)}, "data.fingerprint: saved '"),
    "one row": (
        "llama",
        {"train": lambda: [*TEN[:6], runs.token_rows(1, seed=1)[0], *TEN[7:]]},
        "data.fingerprint: saved '",
    ),
    "order of the rows": ("llama", {"train": lambda: TEN[::-1]}, "data.fingerprint: saved '"),
    "columns": (
        "llama",
        {"train": lambda: [{**row, "position_ids": list(range(8))} for row in TEN]},
        "'labels'], now ['attention_mask', 'input_ids', 'labels', 'position_ids']",
    ),
    "collator's length": ("padded", {"collator": lambda: padded(12)}, "data.fingerprint: saved '"),
    "bf16": ("llama", {"bf16": True}, "precision.autocast: saved 'no', now 'bf16'"),
    "base in bf16": (
        "llama",
        {"model": lambda: with_lora(tiny_llama(dtype=torch.bfloat16))},
        "precision.base: saved 'float32', now 'bfloat16'",
    ),
    "tokenizer": ("tokenizer", {"processing_class": lambda: tiny_tokenizer(["other words"])}, "tokenizer: saved '"),
    "padding token of a classifier": (
        "classifier",
        {"model": lambda: with_lora(tiny_bert(pad_token_id=5))},
        "pad_token_id: saved 0, now 5",
    ),
    "unit of the data": ("given N", {"data_unit": "sequence"}, "data_unit: saved 'token', now 'sequence'"),
    "looks at the probe": ("llama", {"probe_steps": 7}, "probe_steps: saved 100, now 7"),
    "split of corrected noise": ("corrected", TWO_BY_FOUR, "micro_batches: saved 2, now 4"),
    "split of a penalty": ("penalty", TWO_BY_FOUR, "micro_batches: saved 2, now 4"),
    "split of packed rows": ("packed", TWO_BY_FOUR, "micro_batches: saved 2, now 4"),
    "split of a stream": ("stream", TWO_BY_FOUR, "micro_batches: saved 2, now 4"),
    "workers of a stream": ("stream", {"dataloader_num_workers": 2}, "data.workers: saved 0, now 2"),
    "another stream": ("stream", {"train": lambda: Stream(seed=1)}, "data.fingerprint: saved '"),
    "held-out rows": (
        "held out",
        {"eval_dataset": lambda: runs.token_rows(6, seed=6)},
        "heldout.fingerprint: saved '",
    ),
}


def trainer(directory: Path, **changes: Any) -> Any:
    """Two updates of 2 x 2 rows, of ten, with a checkpoint after each."""
    fields = {"max_steps": 2, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1}
    made = {name: value() if callable(value) else value for name, value in (fields | changes).items()}
    return runs.trainer(directory, made.pop("method", SGHMCConfig(num_chains=2)), **made)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The path of the first checkpoint of a run of ``BASES``, which is made once."""
    made: dict[str, Path] = {}

    def of(base: str) -> str:
        if base not in made:
            made[base] = tmp_path_factory.mktemp("run")
            trainer(made[base], **BASES[base]).train()
        return str(made[base] / "checkpoint-1")

    return of


@pytest.mark.reliability("B30")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGES, ids=str)
def test_a_changed_run_is_refused_by_name(tmp_path, checkpoint, name):
    base, changed, words = CHANGES[name]
    other = trainer(tmp_path, **{**BASES[base], **changed})
    with pytest.raises(ValueError, match="belongs to another run.*" + re.escape(words)):
        other.train(checkpoint(base))
    assert other.state.global_step == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", BASES, ids=str)
def test_the_same_run_in_new_objects_is_resumed(tmp_path, checkpoint, base):
    resumed = trainer(tmp_path, **BASES[base])
    resumed.train(checkpoint(base))
    assert resumed.state.global_step == 2


KEPT = {
    "split": ("llama", TWO_BY_FOUR),
    "split with dropout": ("gpt2", TWO_BY_FOUR),
    "attention": ("llama", {"model": lambda: with_lora(tiny_llama(attn_implementation="eager"))}),
    "members_per_pass": ("llama", {"members_per_pass": 1}),
    "logging and evaluation": ("llama", {"logging_steps": 7, "per_device_eval_batch_size": 1, "map_updates": 0}),
}


@pytest.mark.parametrize("name", KEPT, ids=str)
def test_what_only_rounds_or_reports_is_free(tmp_path, checkpoint, name):
    base, changes = KEPT[name]
    resumed = trainer(tmp_path, **{**BASES[base], **changes})
    resumed.train(checkpoint(base))
    assert resumed.state.global_step == 2


def test_long_lists_of_differences_are_cut(tmp_path, checkpoint):
    with pytest.raises(ValueError, match=r"and \d+ more\. Resume") as caught:
        trainer(tmp_path, **BASES["gpt2"]).train(checkpoint("llama"))
    assert str(caught.value).count(": saved ") == 12


def test_dropout_is_found_in_modules_and_in_functions():
    found = dropout_of(with_lora(tiny_llama(attention_dropout=0.2), lora_dropout=0.3, target_modules=["q_proj"]))
    assert sorted(found.values()) == [0.2, 0.2, 0.3, 0.3]
    assert {name.rsplit(".", 1)[1] for name in found} == {"attention_dropout", "default"}


def test_the_split_matters_to_batch_normalisation():
    flags = {"stream": False, "private": False, "packs": False}
    assert not split_matters(SGHMCConfig(), nn.Linear(2, 2), **flags)
    assert split_matters(SGHMCConfig(), nn.Sequential(nn.BatchNorm1d(2)), **flags)
    for name in flags:
        assert split_matters(SGHMCConfig(), nn.Linear(2, 2), **(flags | {name: True}))
