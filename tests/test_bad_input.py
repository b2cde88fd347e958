"""Common mistakes, row by row: refused before the first step, in words, with nothing half-written left.

``REFUSED`` walks the rows that must raise, ``ACCEPTED`` the rows that must work (some with a notice).
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    TrainingArguments,
)

from hf_bayes.fit.laplace import fit_laplace
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.registry import METHODS
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from hf_bayes.pipelines.factory import pipeline
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training.arguments import SHARDING
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs
from tests.faults.corruptions import edit_tensors, sign
from tests.tiny_models import (
    CHECKPOINTING,
    PAD,
    batch,
    tiny_bert,
    tiny_gpt2,
    tiny_llama,
    tiny_tokenizer,
    tiny_vit,
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
    """Something else than arguments and launcher has made the accelerator what it is."""
    state = mock.Mock(deepspeed_plugin=None, fsdp_plugin=accelerator.pop("fsdp_plugin", None))
    defaults = {"mixed_precision": "no", "parallelism_config": None, "state": state}
    made = mock.Mock(**{**defaults, **accelerator})
    with mock.patch("transformers.trainer.Accelerator", return_value=made):
        run(out)


REFUSED = [
    # NaN in the data: the step is named; training/test_chain_optimizer.py has ten more
    Refused(
        "not finite",
        "a label that is NaN",
        lambda out: run(
            out,
            model=tiny_bert(num_labels=1),
            subspace="last_layer",
            train=labelled(NAN),
            noise_std=1.0,
            per_device_train_batch_size=4,
        ),
        ("row 1 of train_dataset", "outside the finite numbers", "nan"),
    ),
    Refused(
        "not finite",
        "a pixel that is NaN",
        training(model=tiny_vit, subspace="last_layer", train=images(NAN), per_device_train_batch_size=4),
        ("non-finite", "at step 1 (chains 0, 1", "check the data"),
        FloatingPointError,
    ),
    # the data set
    Refused("data", "empty data", training(train=Dataset.from_list([])), ("train_dataset has 0 rows", "N is needed")),
    Refused("data", "no data", lambda out: custom_none(out), ("training needs a train_dataset", "got None")),
    Refused("data", "a stream", training(train=Stream(), max_steps=-1), ("no length", "cannot infer N", "num_data=")),
    Refused(
        "data", "a stream, chain by chain", training(train=Stream(), num_data=7.0), ("no length", "minibatch='shared'")
    ),
    Refused(
        "data",
        "a stream without end",
        training(train=Stream(), num_data=7.0, minibatch="shared", max_steps=-1),
        ("no length", "set max_steps"),
    ),
    Refused(
        "data",
        "a stream for an exact kernel",
        training(method=HMCConfig(num_chains=1), train=Stream(), num_data=7.0, minibatch="shared"),
        ("no length", "hmc needs all rows", "materialise it"),
    ),
    Refused(
        "data",
        "a stream for a second look",
        training(method=LaplaceConfig(), train=Stream(), num_data=7.0, minibatch="shared"),
        ("no length", "laplace passes over all rows once more", "materialise it"),
    ),
    Refused("data", "no labels", training(train=[{"input_ids": [5, 6, 7]}] * 4), ("no labels", "input_ids")),
    # counts
    *[
        Refused(
            "counts",
            f"num_chains={value}",
            config(num_chains=value),
            ("num_chains must be an integer >= 1", f"got {value!r}"),
        )
        for value in (0, -1, 1.5, True, "4")
    ],
    Refused(
        "counts", "draws_per_chain=0", config(draws_per_chain=0), ("draws_per_chain must be an integer >= 1, got 0",)
    ),
    Refused("counts", "thin=0", config(thin=0), ("thin must be an integer >= 1, got 0",)),
    Refused("counts", "members_per_pass=0", training(members_per_pass=0), ("members_per_pass must be >= 1, got 0",)),
    # temperature
    *[
        Refused(
            "temperature", f"temperature={value}", config(temperature=value), ("temperature must be", f"got {value!r}")
        )
        for value in (-1.0, NAN, math.inf, "1")
    ],
    Refused("temperature", "map at T = 1", config("map", temperature=1.0), ("map: temperature must be 0, got 1.0",)),
    Refused(
        "temperature", "hmc at T = 0", config("hmc", temperature=0.0), ("hmc: temperature must be > 0", 'method="map"')
    ),
    Refused(
        "temperature",
        "unknown tempering",
        config(temper="both"),
        ("temper must be one of posterior, likelihood", "'both'"),
    ),
    # step sizes and schedules
    *[
        Refused(
            "schedule",
            f"learning_rate={value}",
            training(learning_rate=value),
            ("learning_rate must be", "> 0", f"{value!r}"),
        )
        for value in (0.0, -0.1, NAN)
    ],
    Refused(
        "schedule",
        "a schedule below 0",
        training(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": -0.01}, max_steps=20),
        ("learning rate of -", "at step", "within 0 and learning_rate=0.01", "lr_scheduler_kwargs"),
    ),
    Refused(
        "schedule",
        "a schedule above its peak",
        training(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 0.02}, max_steps=20),
        ("at step 2", "within 0 and learning_rate=0.01", "frictions"),
    ),
    # friction
    Refused("friction", "momentum=1", config(momentum=1.0), ("momentum must be", "< 1, got 1.0")),
    Refused("friction", "momentum=-0.1", config(momentum=-0.1), ("momentum must be", ">= 0", "got -0.1")),
    # draws
    Refused(
        "draws",
        "more draws than updates",
        training(SGHMCConfig(draws_per_chain=9)),
        ("cannot give 9 draws", "train longer"),
    ),
    Refused(
        "draws",
        "burn-in of the whole run",
        training(SGHMCConfig(burn_in=6)),
        ("6 updates with burn_in=6", "would collect 0"),
    ),
    # Trainer takes 0 for the number of updates, and would stop after one
    Refused("draws", "no updates", training(max_steps=0), ("0 updates", "cannot give 1 draws", "train longer")),
    Refused(
        "draws",
        "thinning past the run",
        training(SGHMCConfig(draws_per_chain=2, thin=50)),
        ("thin=50", "cannot give 2"),
    ),
    Refused(
        "draws",
        "a warm start as long as the run",
        training(SGHMCConfig(warm_start_steps=6)),
        ("would collect 0", "6 updates"),
    ),
    # what would change the law
    Refused(
        "target",
        "weight decay",
        training(weight_decay=0.01),
        ("weight_decay=0 (got 0.01)", "counted twice", "prior_std"),
    ),
    Refused("target", "clipping", training(max_grad_norm=1.0), ("max_grad_norm=0 (got 1.0)", "stationary")),
    Refused(
        "target", "another optimizer", training(optim="adafactor"), ("optim of the arguments", "sghmc is the optimizer")
    ),
    Refused("target", "its betas", training(adam_beta1=0.5), ("adam_beta1", "fields of the method's config")),
    Refused("target", "label smoothing", training(label_smoothing_factor=0.1), ("label_smoothing_factor must be 0",)),
    Refused("target", "compiling", training(torch_compile=True), ("torch_compile", "layer.compile()")),
    Refused("target", "noise on embeddings", training(neftune_noise_alpha=5.0), ("neftune_noise_alpha", "likelihood")),
    Refused("target", "fp16", training(fp16=True), ("fp16 is refused", "bf16")),
    Refused(
        "target",
        "steps that follow evaluations",
        training(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1),
        ("would follow held-out rows", "'cosine'"),
    ),
    Refused("target", "rounding at evaluations", training(bf16_full_eval=True), ("would round", "Set bf16=True")),
    Refused(
        "target",
        "fp16 of the launcher",
        launched("ACCELERATE_MIXED_PRECISION", "fp16"),
        ("fp16 is refused", "--mixed_precision bf16"),
    ),
    Refused(
        "target",
        "fp8 of the launcher",
        launched("ACCELERATE_MIXED_PRECISION", "fp8"),
        ("fp8 is refused", "bf16) or float32"),
    ),
    Refused(
        "target",
        "fp16 of the accelerator",
        lambda out: built_before(out, mixed_precision="fp16"),
        ("mixed precision fp16 is refused", "expected one of no, bf16"),
    ),
    # the prior
    *[
        Refused("prior", f"prior_std={value}", config(prior_std=value), ("prior_std must be", "> 0", f"got {value!r}"))
        for value in (0.0, -1.0, NAN)
    ],
    Refused("prior", "one std of several", config(prior_std={"a": 1.0, "b": 0.0}), ("prior_std must be", "got 0.0")),
    Refused(
        "prior",
        "a parameter without a prior",
        training(SGHMCConfig(prior_std={"q_proj": 1.0})),
        ("no expression that matches", "v_proj.lora_A", "['q_proj']"),
    ),
    Refused(
        "prior", "unknown prior mean", config(prior_mean="map"), ("prior_mean must be one of zero, initial", "'map'")
    ),
    # the subspace
    Refused(
        "adapter",
        "LoRA on nothing",
        lambda out: get_peft_model(tiny_llama(), LoraConfig(target_modules=["nowhere"])),
        ("nowhere", "not found"),
    ),
    Refused("subspace", "all frozen", training(model=frozen_model), ("0 parameters to sample", "Unfreeze")),
    Refused(
        "subspace", "no such parameter", training(subspace="nowhere"), ("subspace='nowhere' selects 0 parameters",)
    ),
    Refused("subspace", "no expression", training(subspace="("), ("subspace='('", "regular expression")),
    Refused("layers", "int8", training(model=quantised_model, subspace="up_proj"), ("quantised", "int8", "LoRA")),
    Refused(
        "layers",
        "what cannot be stacked",
        training(model=lambda: with_lora(tiny_llama(), use_dora=True)),
        ("DoRA", "Supported"),
    ),
    Refused(
        "subspace",
        "half an adapter",
        training(subspace="lora_B"),
        ("tensors of the adapter are not random", "lora_A", "trainable"),
    ),
    Refused(
        "subspace",
        "beside an adapter",
        training(subspace="last_layer"),
        ("of the adapter are not random", "merge_and_unload"),
    ),
    # labels and padding
    Refused(
        "padding",
        "packed rows for chains of their own",
        training(collator=DataCollatorWithFlattening()),
        ("made 1 rows of 10", "'independent' deals rows to chains", "pads rows", "minibatch='shared'"),
    ),
    Refused(
        "padding",
        "packed rows whose gradients are squared",
        training(LaplaceConfig(), collator=DataCollatorWithFlattening(), minibatch="shared"),
        ("made 1 rows of 10", "laplace squares the gradients of rows", "pads rows"),
    ),
    Refused(
        "padding",
        "packed rows in a fit",
        lambda out: fit_laplace(with_lora(tiny_llama()), runs.token_rows(), collate=DataCollatorWithFlattening()),
        ("made 1 rows of 10 of data", "squared one by one", "pads rows"),
    ),
    Refused(
        "padding",
        "no pad token",
        training(train=runs.token_rows([3, 5]), collator=no_pad_collator()),
        ("padding token",),
    ),
    Refused(
        "labels",
        "no label at all",
        training(train=[{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 4),
        ("no row of train_dataset has a likelihood term", "-100"),
    ),
    Refused(
        "labels",
        "only the first token is a label",
        training(train=[{"input_ids": [5, 6], "labels": [5, -100]}] * 4),
        ("no row", "after the causal shift"),
    ),
    *[
        Refused(
            "labels",
            f"class {label} of 3",
            training(model=tiny_bert, subspace="last_layer", train=labelled(label, row=2)),
            ("row 2 of train_dataset", "outside 0..2", str(label)),
        )
        for label in (3, -1)
    ],
    Refused(
        "labels",
        "a token outside the vocabulary",
        training(
            train=[*runs.token_rows(2), {"input_ids": [5] * 8, "attention_mask": [1] * 8, "labels": [5] * 7 + [320]}]
        ),
        ("row 2 of train_dataset", "outside 0..319", "tokenizer"),
    ),
    *[
        Refused(
            "labels",
            f"{value} among several labels",  # the energy would have no lower bound, and the chain no posterior
            training(
                model=lambda: tiny_bert(problem_type="multi_label_classification"),
                subspace="last_layer",
                train=[
                    {**row, "label": [0.0, value if at == 2 else 1.0, 1.0]} for at, row in enumerate(runs.label_rows(4))
                ],
            ),
            ("row 2 of train_dataset", "outside 0 to 1", str(value)),
        )
        for value in (-100.0, 2.0, NAN)
    ],
    Refused(
        "labels",
        "classes as fractions",
        training(model=tiny_bert, subspace="last_layer", train=labelled(1.0, row=0)),
        ("row 0 of train_dataset", "integers", "1.0"),
    ),
    Refused(
        "labels",
        "a token outside the vocabulary in a stream",
        training(train=Stream({"labels": [5] * 7 + [320]}), num_data=28, minibatch="shared"),
        ("row 0 of a batch of train_dataset (Stream)", "outside 0..319", "320"),
    ),
    # regression
    Refused(
        "regression",
        "regression without noise_std",
        training(model=lambda: tiny_bert(num_labels=1), subspace="last_layer"),
        ("noise_std > 0", "got None", "BayesianTrainingArguments(noise_std=...)"),
    ),
    Refused("regression", "noise_std=0", training(noise_std=0.0), ("noise_std must be", "> 0, got 0.0")),
    # the output directory
    Refused("output", "a file", in_a_file, ("is a file, expected a directory",), OSError),
    Refused("output", "read-only", read_only, ("cannot write to", "choose another directory"), OSError),
    Refused(
        "output",
        "somebody's model",
        among_foreign_files,
        ("adapter_model.safetensors", "hf_bayes does not overwrite it"),
    ),
    # what this trainer cannot honour
    Refused(
        "trainer",
        "plain TrainingArguments",
        lambda out: custom_trainer(out, args=TrainingArguments(str(out))),
        ("BayesianTrainingArguments, got TrainingArguments",),
    ),
    Refused(
        "trainer", "a method's name", lambda out: custom_trainer(out, method="sghmc"), ("SGHMCConfig(...), got str",)
    ),
    Refused(
        "trainer",
        "no transformers model",
        training(model=lambda: torch.nn.Linear(2, 2)),
        ("transformers or peft model", "Linear"),
    ),
    Refused(
        "trainer",
        "own optimizer",
        lambda out: custom_trainer(out, optimizers=(object(), None)),
        ("optimizers is refused",),
    ),
    Refused(
        "trainer", "own loss", lambda out: custom_trainer(out, compute_loss_func=len), ("compute_loss_func is refused",)
    ),
    *[
        Refused(
            "trainer", f"{name} of the launcher", launched(variable), (f"asks for {name}", "not supported", "quantise")
        )
        for variable, name in SHARDING.items()
    ],
    Refused("trainer", "fsdp", training(fsdp=True), ("FSDP", "not supported")),
    Refused(
        "trainer",
        "sharding of the accelerator",
        lambda out: built_before(out, fsdp_plugin=mock.Mock()),
        ("fsdp_plugin: bases sharded", "whole base"),
    ),
    Refused(
        "trainer",
        "a base in parts",
        lambda out: built_before(out, parallelism_config="tp_size=2"),
        ("parallelism config tp_size=2", "every process needs the whole base", "tp_plan"),
    ),
    Refused("trainer", "DataParallel", on_two_devices, ("nn.DataParallel is refused", "accelerate launch")),
    Refused(
        "trainer",
        "other rows after a resume",
        training(ignore_data_skip=True),
        ("ignore_data_skip is refused", "another run"),
    ),
    Refused(
        "trainer",
        "checkpoints without states",
        training(save_only_model=True, save_strategy="steps", save_steps=2),
        ("save_only_model is refused", "cannot be resumed", "save_strategy='no'"),
    ),
    Refused(
        "trainer",
        "best model",
        training(
            load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps", eval_dataset=runs.token_rows(2)
        ),
        ("load_best_model_at_end is refused", "all of its draws"),
    ),
    Refused(
        "trainer", "batch size by trial", training(auto_find_batch_size=True), ("auto_find_batch_size is refused",)
    ),
    Refused(
        "trainer", "pushing every save", training(push_to_hub=True, hub_strategy="every_save"), ("every_save", "'end'")
    ),
    Refused(
        "trainer",
        "unknown minibatch",
        training(minibatch="both"),
        ("minibatch must be one of independent, shared", "'both'"),
    ),
    Refused(
        "trainer", "unknown data unit", training(data_unit="row"), ("data_unit must be one of token, sequence", "'row'")
    ),
    Refused("trainer", "num_data=0", training(num_data=0.0), ("num_data must be", "> 0, got 0.0")),
    Refused(
        "trainer",
        "reentrant checkpointing",
        training(**{CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}}),
        ("use_reentrant=False",),
    ),
    Refused("trainer", "a misspelt field", config(nun_chains=3), ("nun_chains",), TypeError),
    # rows that no collator reads, or no model
    Refused(
        "rows",
        "a row that is None",
        lambda out: custom_rows(out, [*runs.token_rows(3), None]),
        ("train_dataset has a row", "None (NoneType)", "leave out what is missing"),
    ),
    Refused(
        "rows",
        "rows of text",
        lambda out: custom_rows(out, ["a text"] * 4),
        ("train_dataset has a row", "'a text' (str)", "encode texts with a tokenizer"),
    ),
    *[
        Refused("rows", f"train_dataset={rows!r}", lambda out, rows=rows: custom_rows(out, rows), words)
        for rows, words in (
            ("a text", ("must be a list or data set of rows", "got 'a text'")),
            (5, ("must be a list or data set of rows", "got 5")),
            ([], ("train_dataset has 0 rows", "give it data")),
            ({"train": [], "test": []}, ("mapping with the keys 'train', 'test'", "give one of its splits")),
        )
    ],
    *[
        Refused(
            "rows",
            f"{name} of {tokens}",
            training(
                train=[
                    *runs.token_rows(3, length=3),
                    {"attention_mask": [1] * 3, "labels": [5] * 3, name: tokens}
                    | ({"input_ids": [5] * 3} if name != "input_ids" else {}),
                ]
            ),
            words,
        )
        for name, tokens, words in (
            ("input_ids", [5, 6, 320], ("row 3 of train_dataset", "token id 320, expected 0 to 319")),
            ("input_ids", [5, -1, 6], ("row 3 of train_dataset", "token id -1")),
            ("attention_mask", [0, 0, 0], ("row 3 of train_dataset is padding alone", "Leave the row out")),
        )
    ],
    Refused(
        "rows",
        "fractional ids",
        training(train=[{"input_ids": [5.5, 6.0, 7.0], "labels": [5, 6, 7]}] * 4),
        ("integers [rows, tokens], got torch.float32",),
    ),
    Refused(
        "rows",
        "a row past the table of positions",
        training(model=tiny_gpt2, subspace="last_block", train=[*runs.token_rows(3, length=129)]),
        ("row 0 of train_dataset has 129 tokens", "context of 128 tokens", "cut the text"),
    ),
    Refused(
        "rows",
        "a stream past the table of positions",
        training(
            model=tiny_gpt2,
            subspace="last_block",
            train=Stream({"input_ids": [5] * 129, "attention_mask": [1] * 129, "labels": [5] * 129}),
            num_data=28,
            minibatch="shared",
        ),
        ("of a batch of train_dataset (Stream) has 129 tokens", "context of 128 tokens"),
    ),
    # settings that would say nothing
    *[
        Refused(
            "seed", f"{name}={seed!r}", training(**{name: seed}), (f"{name} must be an integer from 0 to", repr(seed))
        )
        for name, seed in (("seed", 2**32), ("seed", 2**64), ("seed", -1), ("seed", 1.5), ("data_seed", 2**64))
    ],
    *[
        Refused(
            "noise",
            f"noise_std on {kind}",
            training(noise_std=0.5, **changes),
            ("noise_std=0.5 is the standard deviation of a regression's labels", kind, "leave noise_std out"),
        )
        for kind, changes in (
            ("a language model", {}),
            ("a classification head", {"model": tiny_bert, "subspace": "last_layer", "train": runs.label_rows()}),
        )
    ],
    Refused(
        "prior",
        "two expressions for one tensor",
        training(SGHMCConfig(prior_std={"lora": 1.0, "lora_A": 0.1})),
        ("several expressions", "lora_A.default.weight", "['lora', 'lora_A']", "Narrow them"),
    ),
    Refused(
        "tokenizer",
        "a tokenizer larger than the embedding",
        lambda out: run(out, processing_class=grown_tokenizer()),
        ("token ids up to 320", "rows 0 to 319", "resize_token_embeddings"),
    ),
    *[
        Refused("subspace", f"subspace={subspace!r}", training(subspace=subspace), ("subspace must be a text", words))
        for subspace, words in ((["q_proj"], "got ['q_proj'] (list)"), (None, "got None"))
    ],
]


def custom_none(out: Path) -> None:
    BayesianTrainer(with_lora(tiny_llama()), SGHMCConfig(), runs.arguments(out)).train()


def rows_of_the_campaign(case: Refused) -> Any:
    return pytest.param(case, marks=pytest.mark.reliability("F12") if case.topic == "target" else ())


@pytest.mark.parametrize("case", [*map(rows_of_the_campaign, REFUSED)], ids=lambda case: f"{case.topic}-{case.what}")
def test_a_mistake_is_refused_before_the_first_step(tmp_path, monkeypatch, case):
    stepped = []
    step = BayesianTrainer.training_step
    monkeypatch.setattr(BayesianTrainer, "training_step", lambda *a, **k: stepped.append(1) or step(*a, **k))
    out = tmp_path / "out"
    with pytest.raises(case.error) as caught:
        case.act(out)
    message = str(caught.value)
    assert [word for word in case.words if word not in message] == [], message
    assert "\n" not in message.strip() or case.topic in ("adapter", "padding")  # peft's and transformers' own words
    if case.topic != "not finite":
        assert not stepped
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_model_whose_trainer_was_refused_is_as_it_was(tmp_path):
    model = with_lora(tiny_llama())
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    x = torch.arange(4, 12)[None]
    before = model(input_ids=x).logits
    for mistake in (
        {"train": Dataset.from_list([])},
        {"subspace": "lora_B"},
        {"train": [{"input_ids": [5, 6, 7]}] * 4},
    ):
        with pytest.raises(ValueError):
            runs.trainer(tmp_path, SGHMCConfig(), model=model, **mistake)
        assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trainable
        assert torch.equal(model(input_ids=x).logits, before)
    runs.trainer(tmp_path, SGHMCConfig(num_chains=2), model=model).train()


# -- what must work ----------------------------------------------------------------------------------------------------


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO, "hf_bayes")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


def test_temperature_zero_optimises_and_warns(tmp_path, warnings_of):
    with pytest.warns(UserWarning, match="temperature 0 maximises the posterior"):
        run(tmp_path, SGHMCConfig(num_chains=2, temperature=0.0))
    assert "draws no posterior samples" in warnings_of()


def test_too_noisy_minibatches_stop_a_corrected_run_at_a_draw(tmp_path):
    """The noise is measured in the run: the first update warns, and the run stops after a hundred."""
    method = SGHMCConfig(correct_gradient_noise=True, temperature=1e-4, draws_per_chain=1)
    numbers = r"alone brings noise of h\^2 V = [\d.e-]+ against 2 gamma h T = 2e-05"
    with (
        pytest.warns(UserWarning, match=numbers),
        pytest.raises(ValueError, match=rf"no noise left to inject in \d+% .*{numbers}: .*Lower the learning rate"),
    ):
        run(tmp_path, method, gradient_accumulation_steps=2, per_device_train_batch_size=1, max_steps=100)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_lora_target_that_matches_nothing_is_named(tmp_path):
    with pytest.warns(UserWarning, match=r"target_modules \['gate'\] .* match no module"):
        run(tmp_path, model=with_lora(tiny_llama(), target_modules=["q_proj", "gate"]))


def test_lora_targets_that_match_are_not_reported(tmp_path, recwarn):
    run(tmp_path, model=with_lora(tiny_llama(), layers_to_transform=[1]))
    run(tmp_path, model=with_lora(tiny_llama(), target_modules="all-linear"))
    assert not [warning for warning in recwarn if "match no module" in str(warning.message)]


def test_tied_weights_are_sampled_once(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    trainer = run(tmp_path, model=model, subspace="last_layer")
    assert trainer.bayesian.layout.names == ("model.embed_tokens.weight",)
    assert trainer.bayesian.layout.dim == model.lm_head.weight.numel()
    trainer.save_model()
    assert {name for path in tmp_path.glob("members/*/*.safetensors") for name in load_file(path)} == {
        "model.embed_tokens.weight"
    }
    x = torch.arange(4, 12)[None]
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path, base_model=tiny_llama(tie_word_embeddings=True))
    assert torch.equal(loaded(input_ids=x).logits, trainer.bayesian(input_ids=x).logits)


@pytest.mark.parametrize(("learning_rate", "warned"), [(1e-20, True), (1e-2, False)])
def test_updates_lost_in_rounding_are_reported(tmp_path, warnings_of, learning_rate, warned):
    run(tmp_path, learning_rate=learning_rate, max_steps=2)
    assert ("lost in their rounding" in warnings_of()) == warned


@pytest.mark.parametrize(("learning_rate", "warned"), [(1e-20, True), (1e-2, False)])
def test_preconditioner_estimates_are_not_reported_as_lost(tmp_path, warnings_of, learning_rate, warned):
    method = SGHMCConfig(num_chains=2, preconditioner="layerwise", preconditioner_batches=2)
    run(tmp_path, method, learning_rate=learning_rate, max_steps=6)
    assert ("lost in their rounding" in warnings_of()) == warned


def test_a_bfloat16_base_keeps_its_chains_in_float32(tmp_path):
    trainer = run(tmp_path, model=with_lora(tiny_llama(dtype=torch.bfloat16)), learning_rate=1e-5, max_steps=2)
    assert trainer.bayesian.theta.dtype == torch.float32
    assert all(draw.dtype == torch.float32 for draw in trainer.run.draws)
    assert float((trainer.run.draws[-1] == trainer.setup.origin).double().mean()) < 1e-2


def test_padding_enters_neither_num_data_nor_the_loss(tmp_path):
    rows = runs.token_rows([3, 9, 5, 7])
    found = {}
    for name, train in {"collator": rows, "by hand": [padded(row) for row in rows]}.items():
        trainer = run(
            tmp_path, train=train, collator=runs.padding_collator(), max_steps=2, per_device_train_batch_size=4
        )
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found[name] = trainer.num_data, losses
    assert found["collator"][0] == found["by hand"][0] == 2 + 8 + 4 + 6
    assert found["collator"][1] == pytest.approx(found["by hand"][1], rel=1e-5)


def padded(row: dict) -> dict:
    missing = 12 - len(row["input_ids"])
    return {key: value + [fill] * missing for (key, value), fill in zip(row.items(), (PAD, 0, -100), strict=True)}


@pytest.mark.parametrize("minibatch", ["independent", "shared"])
def test_a_batch_without_labels_has_zero_loss_and_no_nan(tmp_path, minibatch):
    silent = [{**row, "labels": [-100] * 8} for row in runs.token_rows(9)]
    trainer = run(tmp_path, train=[*silent, *runs.token_rows(1)], per_device_train_batch_size=1, minibatch=minibatch)
    losses = [entry[f"loss/chain_{k}"] for entry in trainer.state.log_history if "loss" in entry for k in range(2)]
    assert all(math.isfinite(loss) for loss in losses)
    assert 0.0 in losses
    assert trainer.num_data == 7


def test_a_classifier_may_ignore_rows(tmp_path):
    trainer = run(
        tmp_path, model=tiny_bert(), subspace="last_layer", train=labelled(-100), per_device_train_batch_size=1
    )
    assert trainer.num_data == 3


@pytest.mark.parametrize("bias", [-math.inf, 1e4])
def test_extreme_logits_keep_uncertainties_finite(tmp_path, bias):
    model = tiny_bert()
    model.classifier.bias.data[2] = bias
    rows = [{**row, "label": row["label"] % 2} for row in runs.label_rows(8)]
    trainer = run(tmp_path, model=model, subspace="classifier.weight", train=rows, eval_dataset=rows)
    metrics = trainer.evaluate()
    values = {name: metrics[f"eval_{name}"] for name in ("total", "aleatoric", "epistemic", "nll")}
    assert all(math.isfinite(value) for value in values.values())
    assert values["total"] == pytest.approx(values["aleatoric"] + values["epistemic"], abs=1e-6)
    assert values["epistemic"] >= -1e-6


def test_a_single_member_gives_a_warning(tmp_path, warnings_of):
    trainer = run(tmp_path, SGHMCConfig(num_chains=1), eval_dataset=runs.token_rows(3))
    assert "1 member: its epistemic uncertainty is 0" in warnings_of()
    assert trainer.evaluate()["eval_epistemic"] == 0.0


def test_a_gaussian_or_several_members_give_no_warning(tmp_path, warnings_of):
    run(tmp_path, MeanFieldConfig(num_chains=1))
    run(tmp_path, SGHMCConfig(num_chains=1, draws_per_chain=2))
    assert "1 member" not in warnings_of()


def test_a_laplace_fit_far_from_a_map_reports_the_distance(tmp_path):
    model = with_lora(tiny_llama())
    with pytest.warns(
        UserWarning, match=r"no MAP: the gradient .* has norm .* standard deviations away .* Train longer"
    ):
        run(tmp_path, LaplaceConfig(prior_std=0.1), model=model, learning_rate=0.5)


def test_an_indefinite_curvature_is_refused(tmp_path):
    model = tiny_bert(num_labels=3, hidden_size=4, intermediate_size=6)
    method = LaplaceConfig(estimator="hessian", structure="full", prior_std=100.0)
    with pytest.raises(ValueError, match=r"not positive definite \(.*lowest eigenvalue is -.*estimator='ggn'"):
        run(tmp_path, method, model=model, subspace="last_block", train=runs.label_rows(4), max_steps=1)


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_a_laplace_pass_disables_dropout_and_restores_it():
    model = with_lora(tiny_gpt2(resid_pdrop=0.5, attn_pdrop=0.5)).train()
    first, second = (fit_laplace(model, runs.token_rows(4), LaplaceConfig(), seed=3) for _ in range(2))
    assert runs.equal(first.approximation, second.approximation)
    assert all(module.training for module in model.modules())


PREDICTIONS: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "forward": (False, lambda model: model(**batch()).logits),
    "evaluate_batch": (False, lambda model: model.evaluate_batch({**batch(), "labels": batch()["input_ids"]})[0]),
    "generate": (False, lambda model: model.generate(**batch(), output_logits=True, **GREEDY).logits),
    "score": (False, lambda model: model.score(batch()["input_ids"])._asdict()),
    "pipeline": (False, lambda model: pipeline("bayesian-text-generation", model, tiny_tokenizer())("A", **GREEDY)),
    "pipeline.score": (False, lambda model: pipeline("bayesian-text-generation", model, tiny_tokenizer()).score("A b")),
    "forward of a classifier": (True, lambda model: model(**batch())),
    "evaluate_batch of a classifier": (
        True, lambda model: model.evaluate_batch({**batch(), "labels": torch.tensor([0, 1, 2])})[0],
    ),
    "pipeline of a classifier": (
        True, lambda model: pipeline("bayesian-text-classification", model, tiny_tokenizer())("A b"),
    ),
}  # fmt: skip
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}


def has_equal(a: Any, b: Any) -> bool:
    """The same bits, in whatever they are."""
    if isinstance(a, Tensor):
        return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(has_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(has_equal, a, b))
    return a == b


@pytest.mark.parametrize("name", PREDICTIONS)
def test_a_model_trained_with_dropout_predicts_without_it(tmp_path, name):
    classifies, predict = PREDICTIONS[name]
    core, rows = (tiny_bert(), runs.label_rows()) if classifies else (tiny_llama(), runs.token_rows())
    model = run(tmp_path, model=with_lora(core, lora_dropout=0.5), train=rows, max_steps=2).bayesian
    assert model.training  # as transformers' trainer leaves it
    frozen = model.core.get_input_embeddings().eval()
    found = predict(model)
    assert [module for module in model.modules() if not module.training] == [frozen]
    assert has_equal(found, predict(model.eval()))
    assert not any(module.training for module in model.modules())


def test_metropolis_ratios_are_computed_without_dropout(tmp_path):
    errors = []
    for dropout in (0.5, 0.0):
        model = with_lora(tiny_gpt2(resid_pdrop=dropout, attn_pdrop=dropout))
        history = run(tmp_path, HMCConfig(num_chains=1), model=model, max_steps=1).state.log_history
        errors.append([entry["energy_error/chain_0"] for entry in history if "loss" in entry])
    assert errors[0] == errors[1]


def test_own_posteriors_and_checkpoints_may_be_overwritten(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "notes.txt").write_text("of the user")
    for _ in range(2):
        trainer = run(tmp_path, save_strategy="steps", save_steps=3)
        trainer.save_model()
    assert (tmp_path / "notes.txt").read_text() == "of the user"
    assert Posterior.from_pretrained(tmp_path).config.num_members == 2


# -- posteriors that must not be read ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("posterior")
    run(out, SGHMCConfig(num_chains=2, draws_per_chain=2), processing_class=tiny_tokenizer()).save_model()
    return out


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def rewrite_config(directory: Path, **changes: Any) -> None:
    path = directory / "posterior_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(directory: Path, **changes: Any) -> Any:
    return BayesianModelForCausalLM.from_pretrained(directory, **{"base_model": tiny_llama(), **changes})


def respoil(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    edit_tensors(directory / MEMBER, change)
    sign(directory)


MEMBER = "members/member_001/adapter_model.safetensors"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
UNREADABLE: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "truncated": (lambda d: (d / MEMBER).write_bytes((d / MEMBER).read_bytes()[:-9]), (MEMBER,)),
    "bit flip": (lambda d: flip(d / MEMBER), (MEMBER, "sha256")),
    "missing member": (lambda d: shutil.rmtree(d / "members/member_002"), ("member_002",)),
    "edited config": (lambda d: rewrite_config(d, num_members=3), ("posterior_config.json",)),
    # whole and signed, but no member of this ensemble
    "wrong shape": (
        lambda d: respoil(d, lambda tensors: tensors.update({FIRST: tensors[FIRST][:1]})),
        (MEMBER, "q_proj.lora_A", "expected shape [2, 16], got [1, 16]"),
    ),
    "missing key": (lambda d: respoil(d, lambda tensors: tensors.pop(FIRST)), (MEMBER, FIRST)),
    "extra key": (lambda d: respoil(d, lambda tensors: tensors.update(extra=torch.ones(2))), (MEMBER, "extra")),
    "other dtype": (
        lambda d: respoil(d, lambda tensors: tensors.update({FIRST: tensors[FIRST].double()})),
        (MEMBER, FIRST, "float64", "float32"),
    ),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), ("manifest.json",)),
}


@pytest.mark.parametrize("fault", UNREADABLE, ids=str)
def test_a_damaged_posterior_is_refused_by_name(saved, tmp_path, fault):
    directory = Path(shutil.copytree(saved, tmp_path / "copy"))
    spoil, words = UNREADABLE[fault]
    spoil(directory)
    with pytest.raises((ValueError, OSError)) as caught:
        load(directory)
    assert all(word in str(caught.value) for word in words), str(caught.value)


OTHER_BASES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "other seed": (lambda: tiny_llama(seed=1), ("another base model", "weights")),
    "other depth": (lambda: tiny_llama(num_hidden_layers=3), ("another base model", "configuration")),
    "fewer layers": (lambda: tiny_llama(num_hidden_layers=1), ("layers.1",)),
    "other vocabulary": (lambda: tiny_llama(vocab_size=400), ("another base model",)),
    "other dtype": (lambda: tiny_llama(dtype=torch.bfloat16), ("dtype bfloat16", "float32")),
}


@pytest.mark.reliability("F7")
@pytest.mark.parametrize("other", OTHER_BASES, ids=str)
def test_another_base_model_is_refused_before_any_forward(saved, other):
    build, words = OTHER_BASES[other]
    with pytest.raises(ValueError) as caught:
        load(saved, base_model=build())
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.reliability("F7")
def test_resized_embeddings_are_refused(saved):
    model = tiny_llama()
    model.resize_token_embeddings(336, mean_resizing=False)
    with pytest.raises(ValueError, match="another base model"):
        load(saved, base_model=model)


OTHER_PRIORS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "other base": (lambda: with_lora(tiny_llama(seed=1)), ("another base model", "weights fingerprint", "expected")),
    "other shapes": (lambda: with_lora(tiny_llama(), r=3), ("lora_A", "shape [3, 16] here and shape [2, 16] there")),
}


@pytest.mark.parametrize("other", OTHER_PRIORS, ids=str)
def test_a_prior_of_another_model_is_refused(saved, tmp_path, other):
    build, words = OTHER_PRIORS[other]
    with pytest.raises(ValueError) as caught:
        runs.trainer(tmp_path, MAPConfig(), model=build(), prior=saved)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_more_members_than_stored_are_refused(saved):
    with pytest.raises(ValueError, match="asked for 50 members, 4 are stored"):
        load(saved, members=50)
    with pytest.raises(ValueError, match="asked for 0 members"):
        load(saved, members=0)


def test_the_class_of_another_task_is_refused(saved):
    with pytest.raises(ValueError, match="is a posterior for causal_lm"):
        BayesianModelForSequenceClassification.from_pretrained(saved, base_model=tiny_bert())


def test_what_was_saved_is_what_is_loaded(saved):
    """The same directory, untouched, is none of the above."""
    assert load(saved).num_members == 4
    assert load(saved, members=2).num_members == 2


def test_collators_of_transformers_are_understood(tmp_path):
    rows = [{k: v for k, v in row.items() if k != "attention_mask"} for row in runs.label_rows(4)]
    trainer = run(
        tmp_path,
        model=tiny_bert(),
        subspace="last_layer",
        train=rows,
        collator=DataCollatorWithPadding(tiny_tokenizer()),
    )
    assert trainer.num_data == 4
