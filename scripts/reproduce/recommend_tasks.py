"""The tasks of ``recommend``: a model that is made anew for each seed, and encoded rows.

``clinc``, ``debian`` and ``tags`` are classifiers on a pretrained encoder, ``shakespeare`` is a language model. This
module is not a command: ``recommend`` imports it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_bayes.cli.evaluation.case import Case
from hf_bayes.cli.evaluation.classes import CLASS_CASE
from hf_bayes.cli.evaluation.labels import LABEL_CASE
from hf_bayes.cli.evaluation.windows import WINDOW_CASE
from scripts.quickstart_base import pretrain_base, train_tokenizer, windows
from scripts.quickstart_corpora import corpora
from scripts.reproduce.debian_sections import KNOWN, index, rows_of, splits
from scripts.reproduce.debian_tags import TAGS, tagged_rows
from scripts.reproduce.encoder_table import encoder

TOKENS, RANK = 16, 8
WINDOW = 64
"""The tokens of a row of the language model."""
LAST = [5]
"""The last of the encoder's six layers."""

Labelled = list[tuple[str, Any]]


@dataclass(frozen=True)
class Task:
    """A model and rows.

    Attributes:
        model: from a seed to the model, with a new LoRA.
        sets: "train", "heldout" and "test".
        others: rows that are not like the training rows, by name.
        case: the evaluation.
        batch: rows of a minibatch.
        gradients: of each chain.
    """

    model: Callable[[int], PeftModel]
    sets: dict[str, Dataset]
    others: dict[str, Dataset]
    case: Case
    batch: int = 32
    gradients: int = 300


def clinc(data: Path, layers: Sequence[int] | None = None, *, per_intent: int = 10) -> Task:
    """Return CLINC150 (Larson et al. 2019). Others: its out-of-scope queries.

    Args:
        data: folder with clinc150/data_full.json and tinyshakespeare/input.txt.
        layers: those with LoRA; None means all.
        per_intent: training rows of an intent. The number of passes over the rows does not depend on it.
    """
    content = json.loads((data / "clinc150" / "data_full.json").read_text())
    intents = sorted({intent for _, intent in content["train"]})
    numbers = {intent: number for number, intent in enumerate(intents)}

    def take(split: str, count: int) -> Labelled:
        found: dict[str, Labelled] = {intent: [] for intent in intents}
        for text, intent in content[split]:
            if len(found[intent]) < count:
                found[intent].append((text, numbers[intent]))
        rows = [row for part in found.values() for row in part]
        random.Random(0).shuffle(rows)
        return rows

    rows = {"train": take("train", per_intent), "heldout": take("val", 4), "test": take("test", 7)}
    others = {"out of scope": [text for text, _ in content["oos_test"]], **verses(data)}
    task = _of_encoder(rows, others, CLASS_CASE, {"num_labels": len(intents)}, layers)
    return replace(task, gradients=task.gradients * per_intent // 10)


def debian(data: Path, layers: Sequence[int] | None = None) -> Task:
    """Return descriptions of Debian packages with eight sections. Others: the descriptions of eight more sections."""
    parts = splits(rows_of(index()), {"train": 1000, "heldout": 600, "test": 1000, "ood": 1000})
    rows: dict[str, Labelled] = {
        name: [(row.text, KNOWN.index(row.section)) for row in parts[name]] for name in ("train", "heldout", "test")
    }
    others = {"other sections": [row.text for row in parts["ood"]], **verses(data)}
    return _of_encoder(rows, others, CLASS_CASE, {"num_labels": len(KNOWN)}, layers)


def tags(data: Path, layers: Sequence[int] | None = None) -> Task:
    """Return descriptions of Debian packages with twelve tags. Others: descriptions of eight other sections."""
    inside, outside = tagged_rows(index())
    ends = {"train": (0, 1000), "heldout": (1000, 1600), "test": (1600, 2600)}
    rows: dict[str, Labelled] = {
        name: [(row.text, row.labels) for row in inside[begin:end]] for name, (begin, end) in ends.items()
    }
    head = {"num_labels": len(TAGS), "problem_type": "multi_label_classification"}
    others = {"other sections": [row.text for row in outside[:1000]], **verses(data)}
    return _of_encoder(rows, others, LABEL_CASE, head, layers)


def verses(data: Path) -> dict[str, list[str]]:
    """Return lines of Shakespeare, which no classifier has seen."""
    lines = (data / "tinyshakespeare" / "input.txt").read_text().splitlines()
    return {"Shakespeare": [line for line in lines if len(line) > 30][::40][:500]}


def _of_encoder(
    rows: dict[str, Labelled], others: dict[str, list[str]], case: Case, head: dict[str, Any], layers: Any
) -> Task:
    """Return a task of the pretrained encoder, with LoRA in the attention of some ``layers``; None means all."""
    path = str(encoder())
    tokenizer = AutoTokenizer.from_pretrained(path)

    def encoded(texts: list[str], labels: Sequence[Any]) -> Dataset:
        found = tokenizer(texts, truncation=True, padding="max_length", max_length=TOKENS)
        columns = {name: found[name] for name in ("input_ids", "attention_mask")}
        return Dataset.from_dict({**columns, "labels": list(labels)})

    def model(seed: int) -> PeftModel:
        set_seed(seed)
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        base = AutoModelForSequenceClassification.from_pretrained(path, **off, **head)
        where = {"target_modules": ["query", "value"], "layers_to_transform": layers}
        return get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=RANK, lora_alpha=2 * RANK, **where))

    sets = {name: encoded([text for text, _ in part], [label for _, label in part]) for name, part in rows.items()}
    blank = [0.0] * head["num_labels"] if case is LABEL_CASE else 0  # not scored
    return Task(model, sets, {name: encoded(texts, [blank] * len(texts)) for name, texts in others.items()}, case)


def shakespeare(data: Path, base: Path) -> Task:
    """Return a language model of Python's documentation, fine-tuned on Shakespeare. Others: Python, and descriptions.

    Args:
        base: the folder of the language model, which is trained if there is none (some minutes).
    """
    texts = corpora()
    if not (base / "config.json").exists():
        pretrain_base(texts["pretrain"], train_tokenizer(texts["pretrain"]), base)
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    play = (data / "tinyshakespeare" / "input.txt").read_text()
    train, rest = play[: len(play) // 2], play[len(play) // 2 :]
    heldout, test = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    descriptions = "\n".join(row.text for row in rows_of(index()))
    sets = {
        "train": _windows(train, tokenizer, 400), "heldout": _windows(heldout, tokenizer, 240),
        "test": _windows(test, tokenizer, 400),
    }  # fmt: skip
    others = {
        "documentation": _windows("\n".join(texts["validation"]), tokenizer, 200),
        "descriptions": _windows(descriptions, tokenizer, 200),
    }

    def model(seed: int) -> PeftModel:
        set_seed(seed)
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj", "down_proj"]
        )
        return get_peft_model(AutoModelForCausalLM.from_pretrained(str(base)), lora)

    return Task(model, sets, others, WINDOW_CASE, batch=8)


def _windows(text: str, tokenizer: PreTrainedTokenizerBase, limit: int) -> Dataset:
    rows = windows([text], tokenizer, length=WINDOW, limit=limit)
    return Dataset.from_dict({"input_ids": rows["input_ids"], "labels": rows["input_ids"]})
