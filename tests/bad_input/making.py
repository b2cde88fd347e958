"""A row of the mistakes, and the functions that make them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from datasets import Dataset
from peft import PeftModel
from torch.utils.data import IterableDataset
from transformers import (
    DataCollatorForSeq2Seq,
)

from hf_bayes.methods.registry import METHODS
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs
from tests.tiny_models import (
    tiny_bert,
    tiny_llama,
    tiny_tokenizer,
    with_lora,
)

NAN = float("nan")


class Refused(NamedTuple):
    """One mistake: what is done, what it raises, and words that say what, got, expected or what to do."""

    topic: str
    what: str
    act: Callable[[Path], Any]
    words: tuple[str, ...]
    error: type[Exception] = ValueError


def run(out: Path, method: Any = None, **changes: Any) -> BayesianTrainer:
    """Train; a mistake may be noticed anywhere before the first step."""
    trainer = runs.trainer(out, method or SGHMCConfig(num_chains=2), **changes)
    trainer.train()
    return trainer


def config(name: str = "sghmc", **fields: Any) -> Callable[[Path], Any]:
    return lambda out: METHODS[name](**fields)


def training(method: Any = None, **changes: Any) -> Callable[[Path], Any]:
    return lambda out: run(out, method, **{k: v() if k == "model" else v for k, v in changes.items()})


class Stream(IterableDataset):
    def __init__(self, changed: dict[str, list[int]] | None = None) -> None:
        self.changed = changed or {}

    def __iter__(self) -> Iterator[dict]:
        yield from ({**row, **self.changed} for row in runs.token_rows(4))


def labelled(label: Any, row: int = 1) -> list[dict]:
    rows = runs.label_rows(4)
    return [{**r, "label": label if i == row else r["label"]} for i, r in enumerate(rows)]


def images(pixel: float) -> list[dict]:
    return [{"pixel_values": [[[pixel] * 8] * 8] * 3, "labels": label} for label in (0, 1, 2, 0)]


def no_pad_collator() -> DataCollatorForSeq2Seq:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    return DataCollatorForSeq2Seq(tokenizer)


def custom_rows(out: Path, rows: Any) -> None:
    BayesianTrainer(with_lora(tiny_llama()), SGHMCConfig(), runs.arguments(out), train_dataset=rows)


def grown_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<a>"])
    return tokenizer


def frozen_model() -> Any:
    model = tiny_llama()
    model.requires_grad_(False)
    return model


def frozen_adapter() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        with_lora(tiny_llama()).save_pretrained(folder)
        return PeftModel.from_pretrained(tiny_llama(), folder)


def named_labels(names: Any) -> Any:
    model = tiny_bert()
    model.config.id2label = names
    return with_lora(model)


def base_named(name: str) -> Any:
    model = tiny_llama()
    model.config._name_or_path = name
    return with_lora(model)


def quantised_model() -> Any:
    model = frozen_model()
    weight = model.model.layers[0].mlp.up_proj
    weight.weight = torch.nn.Parameter(weight.weight.to(torch.int8), requires_grad=False)
    return model


def custom_trainer(out: Path, **keywords: Any) -> None:
    BayesianTrainer(
        with_lora(tiny_llama()),
        keywords.pop("method", SGHMCConfig()),
        keywords.pop("args", runs.arguments(out)),
        train_dataset=Dataset.from_list(runs.token_rows()),
        **keywords,
    )


def in_a_file(out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("a file of the user")
    try:
        run(out)
    finally:
        assert out.read_text() == "a file of the user"
        out.unlink()


def read_only(out: Path) -> None:
    def denied(*args: Any, **kwargs: Any) -> str:
        raise PermissionError(13, "Permission denied")

    make = tempfile.mkdtemp
    tempfile.mkdtemp = denied  # root, who may run the suite, is denied nothing
    try:
        run(out)
    finally:
        tempfile.mkdtemp = make


def among_foreign_files(out: Path) -> None:
    out.mkdir(parents=True)
    (out / "adapter_model.safetensors").write_bytes(b"a model of the user")
    try:
        run(out)
    finally:
        assert (out / "adapter_model.safetensors").read_bytes() == b"a model of the user"
        shutil.rmtree(out)


def launched(variable: str, value: str = "true", **changes: Any) -> Callable[[Path], Any]:
    """Return a run under a variable that ``accelerate launch`` sets for its flags and config file."""

    def act(out: Path) -> None:
        with mock.patch.dict(os.environ, {variable: value}):
            run(out, **changes)

    return act


def on_two_devices(out: Path) -> None:
    args = runs.arguments(out)
    args._n_gpu = 2  # as found where several GPUs are visible to one process
    custom_trainer(out, args=args)


def built_before(out: Path, **accelerator: Any) -> None:
    """Train with an accelerator that was made with other settings than those of arguments and launcher."""
    state = mock.Mock(deepspeed_plugin=None, fsdp_plugin=accelerator.pop("fsdp_plugin", None))
    defaults = {"mixed_precision": "no", "parallelism_config": None, "state": state}
    made = mock.Mock(**{**defaults, **accelerator})
    with mock.patch("transformers.trainer.Accelerator", return_value=made):
        run(out)


def custom_none(out: Path) -> None:
    BayesianTrainer(with_lora(tiny_llama()), SGHMCConfig(), runs.arguments(out)).train()
