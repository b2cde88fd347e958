"""Accuracy, cost and memory of a single pass, for models that were not trained: the tables of docs/single_pass.md.

    python -m scripts.reproduce.single_pass_accuracy            # all tables
    python -m scripts.reproduce.single_pass_accuracy costs      # one of the tables

LoRA is in all blocks of small models of each family, with independent weights of one variance, and Monte Carlo over the
weights gives the variances and means to compare with. Costs, products and memory are of BERT-like classifiers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification
from transformers.utils import logging

from benchmarks.harness import machine
from benchmarks.table import replaced
from hf_bayes.models.single_pass.driver import SinglePass
from hf_bayes.models.single_pass.gaussian_tensor import mean_of
from scripts.reproduce.report import as_text, table
from scripts.reproduce.single_pass_means import means, means_table
from scripts.reproduce.single_pass_products import products, products_table
from scripts.reproduce.small_models import (
    CLASSIFIER,
    FAMILIES,
    attached,
    inputs_of,
    member_moments,
    small,
)

PAGE = Path(__file__).parents[2] / "docs" / "single_pass.md"
RECORD = PAGE.with_suffix(".json")
VARIANCES = (1e-4, 1e-2)
DRAWS, RANK = 4000, 512
STRUCTURE_DRAWS = 2000


@torch.no_grad()
def compared(family: str, variance: float) -> dict[str, float]:
    """Return ratios of total variances, and distances of means over the norm of the members' mean.

    "mean weights" is the distance of the logits of the mean weights, "mean" that of the mean with the drift, and
    "noise" the standard error of the members' mean.
    """
    build, subspace = FAMILIES[family]
    model = build()
    inputs = inputs_of(model)
    found = {}
    with attached(model, subspace, variance) as bayesian:
        mean, wanted = member_moments(bayesian, inputs, DRAWS)

        def error(own: Tensor) -> float:
            return round(float((mean - own).norm() / mean.norm()), 4)

        for label, rank in {"low rank": RANK, "low rank, 16": 16}.items():
            logits = passed(bayesian, inputs, {"structure": "low_rank", "rank": rank})
            found[label] = round(float(logits.spread.variance.sum() / wanted.sum()), 3)
            found[f"{label}: mean"] = error(mean_of(logits) + logits.spread.drift)
            found["mean weights"] = error(mean_of(logits))
        logits = passed(bayesian, inputs, {"structure": "diagonal"})
        found["diagonal"] = round(float(logits.spread.variance.sum() / wanted.sum()), 3)
        found["noise"] = round(float((wanted.sum() / DRAWS).sqrt() / mean.norm()), 4)
    return found


def passed(bayesian: Any, inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> Any:
    """Return the moments of the logits in a single pass."""
    gaussian = bayesian.posterior.approximation
    one = SinglePass(bayesian.members, gaussian.means[0], gaussian.covariances[0], **options)
    with one.open():
        return bayesian.members.forward(inputs).logits


def accuracy() -> dict[str, Any]:
    """Return the figures of each family and weight variance."""
    return {family: {str(v): compared(family, v) for v in VARIANCES} for family in FAMILIES}


# -- the structures for small models -----------------------------------------------------------------------------------

SUBJECTS: dict[str, tuple[Callable[[], Any], str]] = {
    "BERT, head": FAMILIES["head"],
    "BERT, LoRA on queries and values": FAMILIES["bert"],
    "BERT, last feed-forward layers and head": (
        lambda: small("Bert", CLASSIFIER), r"layer\.1\.(intermediate|output)\.dense|classifier",
    ),
    "BERT, values of both blocks": (lambda: small("Bert", CLASSIFIER), r"self\.value"),
    "Llama, LoRA on queries, values and down projections": FAMILIES["llama"],
    "GPT-2, LoRA on attention and first feed-forward layers": FAMILIES["gpt2"],
}  # fmt: skip

STRUCTURES: dict[str, dict[str, Any]] = {
    "full": {"structure": "full"},
    "full, queries and keys at their means": {"structure": "full", "deterministic_scores": True},
    "diagonal": {"structure": "diagonal"},
}


@torch.no_grad()
def structures() -> dict[str, Any]:
    """Return the ratios of variances to those of members, in total and (for the diagonal structure) the median."""
    found: dict[str, Any] = {}
    for name, (build, subspace) in SUBJECTS.items():
        for variance in (VARIANCES[0], VARIANCES[-1]):
            model = build()
            inputs = inputs_of(model, rows=2)
            row: dict[str, float] = {}
            with attached(model, subspace, variance) as bayesian:
                wanted = member_moments(bayesian, inputs, STRUCTURE_DRAWS)[1]
                for label, options in STRUCTURES.items():
                    own = passed(bayesian, inputs, options).spread.variance
                    row[label] = round(float(own.sum() / wanted.sum()), 3)
                row["median"] = round(float((own / wanted).median()), 3)
            found.setdefault(name, {})[str(variance)] = row
    return found


# -- cost and memory ---------------------------------------------------------------------------------------------------

SIZES = {
    (256, 6): ("last two", "all"),
    (384, 6): ("last two",),
    (384, 12): ("last two",),
    (768, 12): ("last two", "all"),
}
"""(width, number of blocks) -> the blocks with a random LoRA."""

ROUNDS = 7
WAYS: dict[str, dict[str, Any]] = {
    "backward, 1": {"structure": "backward", "rank": 1},
    "backward, 2": {"structure": "backward", "rank": 2},
    "low rank, 4": {"structure": "low_rank", "rank": 4},
    "low rank, 16": {"structure": "low_rank", "rank": 16},
    "diagonal": {"structure": "diagonal"},
}


def classifier(width: int, num_blocks: int, random: str) -> tuple[Any, Any]:
    """Return the model without adapter, and the model with a random LoRA."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000, hidden_size=width, num_hidden_layers=num_blocks, num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )  # fmt: skip
    config.num_labels = 6
    plain = BertForSequenceClassification(config).eval()
    base = BertForSequenceClassification(config).eval()
    chosen = range(num_blocks) if random == "all" else [num_blocks - 2, num_blocks - 1]
    lora = LoraConfig(
        task_type="SEQ_CLS", r=8, lora_alpha=16, lora_dropout=0.0, layers_to_transform=list(chosen),
        target_modules=["query", "value", "output.dense"],
    )  # fmt: skip
    model = get_peft_model(base, lora).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return plain, model


def words(rows: int, length: int) -> dict[str, Tensor]:
    """Return a batch of random words."""
    ids = torch.randint(5, 1000, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def cost(width: int, num_blocks: int, random: str) -> dict[str, float]:
    """Return the median processor time of each way, over the time of a plain forward, in turn."""
    plain, model = classifier(width, num_blocks, random)
    inputs = words(16, 32)
    times: dict[str, list[float]] = {name: [] for name in ("plain", *WAYS)}
    with attached(model, "trainable") as bayesian:
        for turn in range(ROUNDS + 1):
            for name, spent in times.items():
                if name != "plain":
                    bayesian.single_pass(**WAYS[name])
                call: Callable[..., Any] = plain if name == "plain" else bayesian
                for _ in range(1 + (turn == 0)):  # the first call of a setting checks rules
                    begin = time.process_time()
                    call(**inputs)
                spent.append(time.process_time() - begin)
    unit = statistics.median(times.pop("plain")[1:])
    return {name: round(statistics.median(spent[1:]) / unit, 2) for name, spent in times.items()}


def costs() -> list[dict[str, Any]]:
    """Return the costs for each size."""
    return [
        {"width": width, "blocks": blocks, "random": random, **cost(width, blocks, random)}
        for (width, blocks), which in SIZES.items()
        for random in which
    ]


@torch.no_grad()
def memory() -> dict[str, Any]:
    """Return the most memory in MB that a call takes beside the weights, by the peak of the process (Linux only)."""
    plain, model = classifier(384, 6, "last two")
    inputs = words(32, 64)
    weights = sum(p.numel() * p.element_size() for p in plain.parameters()) / 2**20
    found: dict[str, float] = {"plain": peak(lambda: plain(**inputs))}
    with attached(model, "trainable") as bayesian:
        for name, options in WAYS.items():
            bayesian.single_pass(**options)
            found[name] = peak(lambda: bayesian(**inputs))
    return {"weights": round(weights, 1), **{name: round(value, 1) for name, value in found.items()}}


def peak(call: Callable[[], Any]) -> float:
    """Return how many MB the resident memory rises during a call.

    It is the least of three calls after the first one: pages that the system has taken back count in some of them.
    """
    call()
    found = []
    for _ in range(3):
        ctypes.CDLL(None).malloc_trim(0)  # memory that an earlier call has freed would not count
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = _status("VmRSS")
        call()
        found.append((_status("VmHWM") - before) / 1024)
    return min(found)


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[1])


# -- tables ------------------------------------------------------------------------------------------------------------


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the parts that the record has."""
    found = {}
    if "accuracy" in record:
        columns = {
            "variance": "low rank", "mean weights": "mean weights", "mean": "low rank: mean",
            "variance, 16": "low rank, 16", "mean, 16": "low rank, 16: mean",
        }  # fmt: skip
        heads = [f"{head}, {v:.0e}".replace("e-0", "e-") for v in VARIANCES for head in columns]
        last = str(VARIANCES[-1])
        lines = [
            [
                family,
                *(f"{row[str(v)][key]:.2f}" for v in VARIANCES for key in columns.values()),
                f"{row[last]['diagonal']:.2f}",
                f"{row[last]['noise']:.3f}",
            ]
            for family, row in record["accuracy"].items()
        ]
        found["accuracy"] = table(["model", *heads, "diagonal, 1e-2", "noise, 1e-2"], lines)
    if "structures" in record:
        lines = [
            [name, f"{float(v):.0e}".replace("e-0", "e-"), *(f"{row[key]:.2f}" for key in (*STRUCTURES, "median"))]
            for name, each in record["structures"].items()
            for v, row in each.items()
        ]
        heads = ["full", "full, queries and keys at their means", "diagonal", "diagonal: median"]
        found["structures"] = table(["model, random weights", "weight variance", *heads], lines)
    if "means" in record:
        found["means"] = means_table(record["means"])
    if "costs" in record:
        lines = [
            [f"{row['width']}, {row['blocks']}", row["random"], *(f"{row[name]:.1f}" for name in WAYS)]
            for row in record["costs"]
        ]
        found["costs"] = table(["width, blocks", "random blocks", *WAYS], lines)
    if "products" in record:
        found["products"] = products_table(record["products"])
    if "memory" in record:
        sizes = record["memory"]
        whole = sizes["weights"] + sizes["plain"]
        lines = [
            [name, f"{sizes[name]:.0f}", f"{(sizes['weights'] + sizes[name]) / whole:.1f}"] for name in ("plain", *WAYS)
        ]
        found["memory"] = table(["prediction", "MB beside the weights", "weights and call, over plain"], lines)
    return found


PARTS: dict[str, Callable[[], Any]] = {
    "accuracy": accuracy, "structures": structures, "means": means, "costs": costs,
    "products": lambda: products(classifier, words), "memory": memory,
}  # fmt: skip


def main() -> None:
    """Measure the chosen parts, and make the tables of the page."""
    parser = argparse.ArgumentParser(description="Measure a single pass of models that were not trained.")
    parser.add_argument("parts", nargs="*", choices=list(PARTS), default=[], help="what to measure")
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for part in parser.parse_args().parts or PARTS:
        record[part] = PARTS[part]()
        RECORD.write_text(as_text(record | {"machine": machine("cpu")}))
    text = PAGE.read_text()
    for name, found in blocks(record).items():
        text = replaced(text, name, found)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
