"""Mistakes in the settings of the trainer, and in what it is given."""

from __future__ import annotations

from unittest import mock

import torch
from transformers import (
    TrainingArguments,
)

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.arguments import SHARDING, BayesianTrainingArguments
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs
from tests.bad_input.making import (
    Refused,
    Stream,
    built_before,
    config,
    custom_rows,
    custom_trainer,
    grown_tokenizer,
    launched,
    on_two_devices,
    run,
    training,
)
from tests.tiny_models import (
    CHECKPOINTING,
    tiny_bert,
    tiny_gpt2,
)

TRAINER_SETTINGS = [
    Refused(
        "trainer",
        "plain TrainingArguments",
        lambda out: custom_trainer(out, args=TrainingArguments(str(out))),
        ("BayesianTrainingArguments, got TrainingArguments",),
    ),
    Refused(
        "trainer",
        "arguments in the place of the method",
        lambda out: BayesianTrainer(tiny_gpt2(), BayesianTrainingArguments(str(out))),
        ("args is missing", "by name, as args="),
    ),
    Refused(
        "trainer",
        "a method's name",
        lambda out: custom_trainer(out, method="sghmc"),
        ("an instance of a class in hf_bayes.METHODS, got 'sghmc'",),
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
        "trainer",
        "own loss",
        lambda out: custom_trainer(out, compute_loss_func=len),
        ("compute_loss_func is refused", "likelihood=hf_bayes.Weighted()", "docs/likelihoods.md"),
    ),
    Refused(
        "trainer",
        "function of the model",
        lambda out: custom_trainer(out, model_init=len),
        ("model_init is refused", "Give model=", "hf_bayes.tune"),
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
        ("load_best_model_at_end is refused", "all of its draws", "Leave it out", "fewer updates"),
    ),
    Refused(
        "trainer",
        "a warm-up of a constant rate",
        training(warmup_steps=0.1),
        ("warmup_steps=0.1 would be ignored", "'constant'", "Set 'constant_with_warmup'", "leave it out"),
    ),
    Refused(
        "trainer",
        "settings of no schedule",
        training(lr_scheduler_kwargs={"num_cycles": 2}),
        ("lr_scheduler_kwargs={'num_cycles': 2} would be ignored", "'constant'", "Set the lr_scheduler_type"),
    ),
    Refused("trainer", "kernels of liger", training(use_liger_kernel=True), ("use_liger_kernel=True", "Leave it out")),
    Refused(
        "trainer",
        "eval sets with numbers as names",
        training(eval_dataset={1: runs.token_rows(2), "a": runs.token_rows(2)}),
        ("eval_dataset has data sets with the names [1]", "expected texts", "Write {'1': ...}"),
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
