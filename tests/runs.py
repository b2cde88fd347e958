"""Tiny runs of BayesianTrainer, quiet and without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import DataCollatorForSeq2Seq, default_data_collator

from hf_bayes.chains.starting_points import initial_members
from hf_bayes.core.config import MethodConfig
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.trainer import BayesianTrainer
from hf_bayes.training.trainer_host import TrainerHost
from tests.tiny_models import VOCABULARY, tiny_llama, tiny_tokenizer, with_lora


def arguments(output_dir: Path | str, **changes: Any) -> BayesianTrainingArguments:
    """Return the arguments of a short run that saves and logs nothing; ``changes`` replace them."""
    fields: dict[str, Any] = {
        "learning_rate": 1e-2,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }
    return BayesianTrainingArguments(str(output_dir), **(fields | changes))


def token_rows(lengths: int | Sequence[int] = 10, *, length: int = 8, seed: int = 0) -> list[dict[str, list[int]]]:
    """Rows of random tokens, each its own label: a number of rows of one length, or their lengths."""
    lengths = [length] * lengths if isinstance(lengths, int) else lengths
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in rows]


def label_rows(count: int = 10, *, num_labels: int = 3, length: int = 6, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of random tokens with a class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_labels, (count,), generator=generator).tolist()
    return [
        {"input_ids": row["input_ids"], "attention_mask": row["attention_mask"], "label": label}
        for row, label in zip(token_rows(count, length=length, seed=seed), labels, strict=True)
    ]


def padding_collator(side: str = "right") -> DataCollatorForSeq2Seq:
    """Pads inputs, and labels with -100, to the longest row of a batch."""
    return DataCollatorForSeq2Seq(tiny_tokenizer(padding_side=side))


def trainer(
    output_dir: Path | str,
    method: MethodConfig,
    *,
    model: Any = None,
    train: Any = None,
    collator: Any = None,
    subspace: str = "trainable",
    kind: type[BayesianTrainer] = BayesianTrainer,
    eval_dataset: Any = None,
    processing_class: Any = None,
    prior: Any = None,
    likelihood: Any = None,
    compute_metrics: Any = None,
    callbacks: Any = None,
    **changes: Any,
) -> BayesianTrainer:
    """Return a trainer of LoRA on a tiny Llama and ten rows of eight tokens; arguments replace these."""
    rows = token_rows() if train is None else train
    return kind(
        with_lora(tiny_llama()) if model is None else model,
        method,
        arguments(output_dir, **changes),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) and rows else rows,
        eval_dataset=Dataset.from_list(eval_dataset) if isinstance(eval_dataset, list) else eval_dataset,
        data_collator=collator or default_data_collator,
        subspace=subspace,
        processing_class=processing_class,
        prior=prior,
        likelihood=likelihood,
        compute_metrics=compute_metrics,
        callbacks=callbacks,
    )


def equal(a: Any, b: Any) -> bool:
    """Return whether two approximations hold the same bits."""
    tensors = [[x.means, x.stds] if isinstance(x, Gaussian) else [x.theta, x.chain] for x in (a, b)]
    return type(a) is type(b) and all(torch.equal(*pair) for pair in zip(*tensors, strict=True))


def origin(trainer: BayesianTrainer) -> Tensor:
    """[M, d], where the chains of this process start."""
    setup = trainer.setup
    return initial_members(
        setup.model.layout, setup.start, setup.method, seed=trainer.args.seed, chains=setup.mesh.chains
    )


def started(trainer: BayesianTrainer) -> ActiveRun:
    """Return the run that ``train`` would begin, before its first update."""
    assert trainer.rows is not None
    return ActiveRun(TrainerHost(trainer), trainer.setup, trainer.rows)
