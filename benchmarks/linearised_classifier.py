"""Linearised predictions of classifiers against a plain evaluation of the same rows.

``python -m benchmarks.linearised_classifier`` writes benchmarks/results/linearised_classifier.json and the table of
docs/laplace.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

from benchmarks.harness import ROOT, compare, in_child, interleave, machine, peak_memory, timed
from benchmarks.models import RANK
from benchmarks.table import RESULTS, replaced, row
from hf_bayes import attach
from hf_bayes.core.layout import Layout
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import Covariance, Diagonal, DiagonalBlock, Kronecker, KroneckerBlock
from hf_bayes.models.linearised.outputs import gaussian_outputs

NAME = "linearised_classifier"
DOCUMENT = ROOT / "docs" / "laplace.md"
ROWS, BATCH, LIMIT = 32, 32, 5.0
VOCABULARY = 8192
HEAD = """\
| work | measured | 90 % interval | wanted | memory | plain: memory |
|---|---|---|---|---|---|"""


class Work(NamedTuple):
    """A classifier and its posterior.

    Attributes:
        width: of its 6 blocks.
        where: "last_block" or "LoRA".
        structure: "diagonal" or "Kronecker".
        tokens: of a row.
        classes: number of outputs.
        reads: "first" (BERT) or "last" (GPT-2), the position that the head reads; "mean" of BERT's positions.
    """

    width: int
    where: str
    structure: str
    tokens: int = 24
    classes: int = 3
    reads: str = "first"

    @property
    def name(self) -> str:
        """The text of the table's first column."""
        random = "LoRA on all blocks" if self.where == "LoRA" else "last block"
        head = f"head on {self.reads} position" if self.reads != "mean" else "head on mean of positions"
        return f"width {self.width}, {random}, {self.structure}, {self.tokens} tokens, {self.classes} classes, {head}"


WORKS = [
    *(Work(384, "last_block", structure) for structure in ("diagonal", "Kronecker")),
    *(Work(768, "last_block", structure) for structure in ("diagonal", "Kronecker")),
    Work(384, "last_block", "Kronecker", tokens=128),
    Work(384, "last_block", "Kronecker", classes=6),
    Work(384, "last_block", "Kronecker", classes=20),
    Work(384, "last_block", "Kronecker", reads="last"),
    *(Work(384, "last_block", structure, reads="mean") for structure in ("diagonal", "Kronecker")),
    *(Work(384, "LoRA", structure) for structure in ("diagonal", "Kronecker")),
]
"""The works that are timed: width 384 is the shape of MiniLM, width 768 that of BERT base with half of its blocks."""


class Mean(nn.Module):
    """A pooler that averages positions."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [B, n] of [B, T, n]."""
        return hidden.mean(1)


def classifier(work: Work) -> Any:
    """Return a classifier with random weights in evaluation mode."""
    torch.manual_seed(0)
    width, common = work.width, {"vocab_size": VOCABULARY, "num_labels": work.classes}
    model: Any
    if work.reads == "last":
        model = GPT2ForSequenceClassification(
            GPT2Config(
                n_embd=width, n_layer=6, n_head=12, pad_token_id=0, eos_token_id=None, bos_token_id=None, **common
            )
        )
    else:
        config = BertConfig(
            hidden_size=width, num_hidden_layers=6, num_attention_heads=12, intermediate_size=4 * width, **common
        )
        model = BertForSequenceClassification(config)
        if work.reads == "mean":
            model.bert.pooler = Mean()
    if work.where == "LoRA":
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=["query", "value"], init_lora_weights=False))
    return model.eval()


def covariance(structure: str, layout: Layout) -> Covariance:
    """Return a covariance with random bases. The time does not depend on its values."""
    if structure == "diagonal":
        return Diagonal(torch.full((layout.dim,), 0.01))
    bases = {side: torch.linalg.qr(torch.randn(side, side))[0] for shape in layout.shapes for side in shape}
    return Kronecker(
        tuple(
            KroneckerBlock(bases[shape[0]], bases[shape[1]], torch.full(shape, 1e-4))
            if len(shape) == 2
            else DiagonalBlock(torch.full((math.prod(shape),), 0.01))
            for shape in layout.shapes
        )
    )


def both(work: Work) -> dict[str, Callable[[], Any]]:
    """Return a plain evaluation of all rows and the Gaussian outputs for them."""
    model = classifier(work)
    plain = copy.deepcopy(model)
    ids = torch.randint(3, VOCABULARY, (ROWS, work.tokens))
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(BATCH)]
    bayesian = attach(model, subspace="trainable" if work.where == "LoRA" else work.where)
    gaussian = Gaussian(bayesian.theta.detach(), (covariance(work.structure, bayesian.layout),))

    @torch.no_grad()
    def evaluate() -> None:
        for batch in batches:
            plain(**batch)

    def linearised() -> None:
        for batch in batches:
            gaussian_outputs(bayesian, gaussian, batch)

    return {"single": evaluate, "linearised": linearised}


def memory(number: int) -> dict[str, int]:
    """Return the bytes by which memory grows at most."""
    warnings.filterwarnings("ignore")
    found = {}
    for name, work in both(WORKS[number]).items():
        work()
        found[name] = peak_memory("cpu", work)
    return found


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return the lines of the table."""
    lines = []
    for number, work in enumerate(WORKS):
        works = {name: lambda one=one: timed(one, "cpu") for name, one in both(work).items()}
        seconds = interleave(works, rounds)
        line = compare("linearised", work.name, seconds, ours="linearised", limit=LIMIT).to_json()
        lines.append({**line, "memory": in_child(f"benchmarks.{NAME}:memory", number)})
        print(row(line), flush=True)
    return lines


def render(record: dict[str, Any]) -> str:
    """The table of a run."""
    about = record["machine"]
    lines = [
        f"{ROWS} rows in batches of {BATCH}, 6 blocks, float32, {record['rounds']} rounds. {about['processor']}, "
        f"threads: {about['threads']}, torch {about['torch']}; load {record['load_before']:.1f} beforehand.",
        "",
        HEAD,
    ]
    for line in record["lines"]:
        cells = row(line).split(" | ")[:4]
        sizes = [f"{line['memory'][name] / 1e6:.0f} MB" for name in ("linearised", "single")]
        lines.append(f"{' | '.join([*cells, *sizes])} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="keep the result in this file, and leave the document alone")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    busy = os.getloadavg()[0]
    record = {
        "machine": machine("cpu"),
        "load_before": busy,
        "rounds": options.rounds,
        "lines": measure(options.rounds),
    }
    (options.output or RESULTS / f"{NAME}.json").write_text(json.dumps(record, indent=1) + "\n")
    if options.output is None:
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(), "linearised-classifier", render(record)))


if __name__ == "__main__":
    main()
