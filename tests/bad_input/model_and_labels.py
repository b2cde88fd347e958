"""Mistakes in the model, its random parameters, its labels and the output directory."""

from __future__ import annotations

from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorWithFlattening,
)

from hf_bayes.fit.laplace import fit_laplace
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from tests import runs
from tests.bad_input.making import (
    NAN,
    Refused,
    Stream,
    among_foreign_files,
    base_named,
    frozen_adapter,
    frozen_model,
    in_a_file,
    labelled,
    named_labels,
    no_pad_collator,
    quantised_model,
    read_only,
    training,
)
from tests.tiny_models import (
    tiny_bert,
    tiny_llama,
    with_lora,
)

MODEL_AND_LABELS = [
    Refused(
        "adapter",
        "LoRA on nothing",
        lambda out: get_peft_model(tiny_llama(), LoraConfig(target_modules=["nowhere"])),
        ("nowhere", "not found"),
    ),
    Refused("subspace", "all frozen", training(model=frozen_model), ("0 parameters to sample", "Unfreeze")),
    Refused(
        "subspace",
        "a loaded adapter that is frozen",
        training(model=frozen_adapter),
        ("0 parameters to sample", "PeftModel.from_pretrained(base, adapter, is_trainable=True)"),
    ),
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
    *[
        Refused(
            "posterior",  # refused after the training, it would lose the draws
            f"an adapter with {', '.join(settings)}",
            training(model=lambda settings=settings: with_lora(tiny_llama(), **settings)),
            ("the adapter of this model", *settings, *words),
        )
        for settings, words in (
            ({"lora_alpha": 0}, ("must be a number > 0, got 0",)),
            ({"alpha_pattern": {"q_proj": 0}}, ("numbers > 0",)),
            ({"use_qalora": True}, ("is not supported", "Leave it out")),
            ({"ensure_weight_tying": True}, ("is not supported", "Leave it out")),
        )
    ],
    *[
        Refused(
            "posterior",
            f"labels {what}",
            training(model=lambda names=names: named_labels(names), train=runs.label_rows(8)),
            ("id2label of the model's config", *words),
        )
        for what, names, words in (
            ("that are counted from 1", {1: "a", 2: "b", 3: "c"}, ("[1, 2, 3]", "expected 0 to 2", "from 0")),
            ("without a name", {0: "a", 1: None, 2: "c"}, ("None", "expected a text or a number")),
        )
    ],
    Refused(
        "posterior",
        "a base of two lines",
        training(model=lambda: base_named("a\nb")),
        ("name_or_path", "a line of text", "a\\nb"),
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
        "one number where there are several labels",
        training(
            model=lambda: tiny_bert(problem_type="multi_label_classification"),
            subspace="last_layer",
            train=[{**row, "label": at % 2} for at, row in enumerate(runs.label_rows(4))],
        ),
        ("do not fit the logits", "a Bernoulli likelihood expects", "problem_type"),
    ),
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
        "regression without noise_std and held-out rows",
        training(model=lambda: tiny_bert(num_labels=1), subspace="last_layer"),
        ("learnt from 50 held-out rows", "there is no eval_dataset", "or give noise_std > 0"),
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
]
