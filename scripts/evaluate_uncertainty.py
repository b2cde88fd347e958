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
from rich.text import Text
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
LINES = ("-", "--", ":", "-.")
FILLED = 3  # of more areas over each other nobody tells which is which


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


def texts_of(test: str, pairs: list[str]) -> dict[str, str]:
    """{name: file}, "test" first, of ``name=file`` for each other text.

    Raises:
        ValueError: for anything else, and for a name that another text has: its figures would be lost.
    """
    texts = {"test": test}
    for pair in pairs:
        name, sign, path = pair.partition("=")
        if not (name and sign and path):
            raise ValueError(
                f"--ood takes name=file for each text, such as code=code.txt, got {pair!r}: give the file a name"
            )
        if name == "test":
            raise ValueError(f'--ood got {pair!r}, and "test" is the text of --test ({test}): choose another name')
        if name in texts:
            raise ValueError(f"--ood got the name {name!r} for {texts[name]} and for {path}: give each text its own")
        texts[name] = path
    return texts


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


def look(number: int) -> dict:
    """How the histogram of a text is drawn, another way for each: areas for the first, outlines for the others."""
    turn, place = divmod(number, len(COLOURS))
    if number < FILLED:
        return {"color": COLOURS[place], "alpha": 0.65}
    return {"color": COLOURS[place], "histtype": "step", "linestyle": LINES[turn % len(LINES)], "linewidth": 1.5}


def plot(found: dict[str, dict], results: dict, directory: Path) -> None:
    """Histograms of window scores, and the reliability diagram of the test text."""
    height = 3.4 + 0.2 * -(-len(found) // 2)  # and the lines of a legend in two columns, which would hide bars inside
    figure, axes = plt.subplots(1, 3, figsize=(12, height), layout="constrained")
    for axis, measure in zip(axes, ("total", "epistemic"), strict=False):
        scores = {name: values[measure].mean(1) for name, values in found.items()}
        edges = np.histogram_bin_edges(np.concatenate(list(scores.values())), 30)
        for number, (name, values) in enumerate(scores.items()):
            area = results["auroc"].get(name, {}).get(measure)
            label = name if area is None else f"{name} (AUROC {area:.3f})"
            axis.hist(values, edges, density=True, label=label, **look(number))
        axis.set(xlabel=f"mean {measure} uncertainty of a window (nats)", ylabel="density")
        axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))
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


def show(results: dict, posterior: str, console: Console) -> None:
    """A table of the test text, and one with a row for each other text."""
    table = Table(title=Text(f"{posterior}: {results['members']} members"))
    for column in ("NLL", "member NLL", "accuracy", "ECE"):
        table.add_column(column, justify="right")
    table.add_row(*(f"{results[key]:.4f}" for key in ("nll", "member_nll", "accuracy", "ece")))
    console.print(table)
    if not results["auroc"]:
        return
    table = Table(title="Telling other text from it")
    table.add_column("text", overflow="fold")
    for column in ("AUROC TU", "AUROC EU"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, areas in results["auroc"].items():
        cells = ["-" if m not in areas else f"{areas[m]:.4f}" for m in ("total", "epistemic")]
        table.add_row(Text(name), *cells)  # a name is no markup
    console.print(table)


def main() -> None:
    """Load, score, tabulate, plot."""
    (args,) = parse_arguments(Arguments)
    texts = texts_of(args.test, args.ood)
    directory = Path(args.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(args.posterior)
    model = BayesianModelForCausalLM.from_pretrained(args.posterior, members=args.members, base_model=args.base_model)
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
    show(results, args.posterior, Console(width=100))


if __name__ == "__main__":
    main()
