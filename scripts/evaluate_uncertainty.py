"""How good a posterior's uncertainty is: NLL and calibration on held-out text, and whether it knows other text as such.

    python scripts/evaluate_uncertainty.py --posterior out --test test.txt --ood code=code.txt rot13=rot13.txt

Texts are cut into windows of equal length. A window's score is the mean over its tokens of the total (TU) or epistemic
(EU) uncertainty; AUROC is that of telling a set's windows from the test text's. Writes results.json and a PNG.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hf_bayes import BayesianModelForCausalLM
from hf_bayes.cli import parse_arguments
from hf_bayes.data import token_windows
from hf_bayes.loading import load_tokenizer
from hf_bayes.metrics import ood_auroc, summarise

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")  # Paul Tol's bright, safe for all eyes


@dataclass
class Arguments:
    """What to evaluate, and on what."""

    posterior: str = field(metadata={"help": "A posterior directory or a repository of the Hub."})
    test: str = field(metadata={"help": "Held-out text in distribution, one file."})
    ood: list[str] = field(default_factory=list, metadata={"help": "Other texts, as name=file."})
    output_dir: str = field(default="evaluation", metadata={"help": "Where results.json and the plots go."})
    base_model: str | None = field(default=None, metadata={"help": "Where the base model is, if not where it was."})
    members: int | None = field(default=None, metadata={"help": "How many members; all by default."})
    length: int = field(default=128, metadata={"help": "Tokens of a window."})
    max_windows: int = field(default=200, metadata={"help": "Windows of each text at most, evenly spread."})
    batch_size: int = field(default=8, metadata={"help": "Windows of a batch."})


def windows_of(path: str, tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int) -> torch.Tensor:
    """[windows, length] token ids without overlap."""
    text = Dataset.from_dict({"text": [Path(path).read_text(encoding="utf-8")]})
    rows = token_windows(text, tokenizer, length=length, join=True)
    whole = [row["input_ids"] for row in rows if len(row["input_ids"]) == length]
    if not whole:
        raise ValueError(f"{path} is shorter than one window of {length} tokens: give more text or a smaller --length")
    count = min(limit, len(whole))
    return torch.tensor([whole[i * len(whole) // count] for i in range(count)])


@torch.no_grad()
def statistics(model: BayesianModelForCausalLM, windows: torch.Tensor, *, batch_size: int, name: str) -> dict:
    """{nll, confidence, correct, brier, total, aleatoric, epistemic, member_nll}: [windows, length - 1]."""
    pieces = []
    for batch in tqdm(windows.to(model.device).split(batch_size), desc=name, leave=False):
        found, _ = model.evaluate_batch({"input_ids": batch, "labels": batch})
        del found["member_log_lik"]
        pieces.append({key: value.float().view(len(batch), -1).cpu() for key, value in found.items()})
    return {key: torch.cat([piece[key] for piece in pieces]).numpy() for key in pieces[0]}


def auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    """Of telling the windows of another text from those of the test text by their scores."""
    scores, is_other = np.concatenate([inside, outside]), np.repeat([0, 1], [len(inside), len(outside)])
    return ood_auroc(scores, is_other)


def plot(found: dict[str, dict], results: dict, directory: Path) -> None:
    """Histograms of window scores, and the reliability diagram of the test text."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for axis, measure in zip(axes, ("total", "epistemic"), strict=False):
        scores = {name: values[measure].mean(1) for name, values in found.items()}
        edges = np.histogram_bin_edges(np.concatenate(list(scores.values())), 30)
        for (name, values), colour in zip(scores.items(), COLOURS, strict=False):
            area = results["auroc"].get(name, {}).get(measure)
            label = name if area is None else f"{name} (AUROC {area:.3f})"
            axis.hist(values, edges, density=True, alpha=0.65, color=colour, label=label)
        axis.set(xlabel=f"mean {measure} uncertainty of a window (nats)", ylabel="density")
        axis.legend(frameon=False, fontsize=8)
    test = found["test"]
    bins = np.clip((test["confidence"].ravel() * 15).astype(int), 0, 14)
    count = np.bincount(bins, minlength=15)
    used = count > 0
    confidence = np.bincount(bins, test["confidence"].ravel(), 15)[used] / count[used]
    accuracy = np.bincount(bins, test["correct"].ravel(), 15)[used] / count[used]
    axes[2].plot([0, 1], [0, 1], color="0.6", lw=1)
    axes[2].plot(confidence, accuracy, "o-", color=COLOURS[0], ms=4)
    axes[2].set(
        xlabel="confidence", ylabel="accuracy", title=f"test text, ECE {results['ece']:.4f}", xlim=(0, 1), ylim=(0, 1)
    )
    figure.savefig(directory / "uncertainty.png", dpi=150)


def main() -> None:
    """Load, score, tabulate, plot."""
    (args,) = parse_arguments(Arguments)
    directory = Path(args.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(args.posterior)
    model = BayesianModelForCausalLM.from_pretrained(args.posterior, members=args.members, base_model=args.base_model)
    texts = {"test": args.test, **dict(pair.split("=", 1) for pair in args.ood)}
    found = {
        name: statistics(
            model,
            windows_of(path, tokenizer, length=args.length, limit=args.max_windows),
            batch_size=args.batch_size,
            name=name,
        )
        for name, path in texts.items()
    }
    test = found["test"]
    summary = summarise({key: value.ravel() for key, value in test.items()})
    results = {"members": model.num_members, **summary, "auroc": {}}
    for name, values in found.items():
        if name != "test":
            results["auroc"][name] = {
                measure: auroc(test[measure].mean(1), values[measure].mean(1))
                for measure in ("total", "epistemic")
                if measure == "total" or model.num_members > 1  # of one member, EU is 0 everywhere
            }
    (directory / "results.json").write_text(json.dumps(results, indent=2))
    plot(found, results, directory)
    table = Table(title=f"{args.posterior}: {model.num_members} members")
    columns = ["NLL", "member NLL", "accuracy", "ECE"]
    for column in columns + [f"AUROC {name} {m}" for name in results["auroc"] for m in ("TU", "EU")]:
        table.add_column(column, justify="right")
    areas = [areas.get(m) for areas in results["auroc"].values() for m in ("total", "epistemic")]
    row = [results["nll"], results["member_nll"], results["accuracy"], results["ece"], *areas]
    table.add_row(*("-" if value is None else f"{value:.4f}" for value in row))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
