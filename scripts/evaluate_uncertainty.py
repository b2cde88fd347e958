"""Evaluate the uncertainty of a posterior: NLL and calibration on held-out text, and detection of other kinds of text.

    python scripts/evaluate_uncertainty.py --posterior out --test test.txt --ood code=code.txt rot13=rot13.txt

Texts are cut into windows of equal length. The score of a window is the mean total (TU) or epistemic (EU) uncertainty
of its tokens. The AUROC measures how well scores separate the windows of another text from the windows of the test
text. The script writes results.json and a PNG.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from rich.console import Console
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from uncertainty_results import plot, show

from hf_bayes import BayesianModelForCausalLM
from hf_bayes.cli.arguments import parse_arguments
from hf_bayes.cli.token_windows import token_windows
from hf_bayes.metrics import ood_auroc, summarise
from hf_bayes.models.loading import load_tokenizer


@dataclass
class Arguments:
    """The posterior to evaluate and the texts."""

    posterior: str = field(metadata={"help": "A posterior directory or a repository of the Hub."})
    test: str = field(metadata={"help": "Held-out text in distribution, one file."})
    ood: list[str] = field(default_factory=list, metadata={"help": "Other texts, as name=file."})
    output_dir: str = field(default="evaluation", metadata={"help": "Directory of results.json and the plots."})
    base_model: str | None = field(default=None, metadata={"help": "Folder or id of the base model, if it has moved."})
    members: int | None = field(default=None, metadata={"help": "Number of members. Default: all."})
    length: int = field(default=128, metadata={"help": "Tokens of a window."})
    max_windows: int = field(default=200, metadata={"help": "Largest number of windows of each text, evenly spread."})
    batch_size: int = field(default=8, metadata={"help": "Windows of a batch."})

    def __post_init__(self) -> None:
        for name in ("max_windows", "batch_size"):
            if (count := getattr(self, name)) < 1:
                raise ValueError(f"--{name} must be at least 1, got {count}: it counts windows of {self.length} tokens")


def texts_of(test: str, pairs: list[str]) -> dict[str, str]:
    """Return {name: file}, "test" first, from ``name=file`` for each other text.

    Raises:
        ValueError: for another form, and for a name that occurs twice: the figures of one text would be lost.
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
    """Return token ids [windows, length] without overlap."""
    text = Dataset.from_dict({"text": [Path(path).read_text(encoding="utf-8")]})
    rows = token_windows(text, tokenizer, length=length, join=True)
    whole = [row["input_ids"] for row in rows if len(row["input_ids"]) == length]
    if not whole:
        raise ValueError(f"{path} is shorter than one window of {length} tokens: give more text or a smaller --length")
    count = min(limit, len(whole))
    return torch.tensor([whole[i * len(whole) // count] for i in range(count)])


@torch.no_grad()
def statistics(model: BayesianModelForCausalLM, windows: torch.Tensor, *, batch_size: int, name: str) -> dict:
    """Return nll, confidence, correct, brier, total, aleatoric, epistemic, member_nll, each [windows, length - 1]."""
    pieces = []
    for batch in tqdm(windows.to(model.device).split(batch_size), desc=name, leave=False):
        found, _ = model.evaluate_batch({"input_ids": batch, "labels": batch})
        del found["member_log_lik"]
        pieces.append({key: value.float().view(len(batch), -1).cpu() for key, value in found.items()})
    return {key: torch.cat([piece[key] for piece in pieces]).numpy() for key in pieces[0]}


def auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    """Return the AUROC of separating the windows of another text from the windows of the test text by their scores."""
    scores, is_other = np.concatenate([inside, outside]), np.repeat([0, 1], [len(inside), len(outside)])
    return ood_auroc(scores, is_other)


def main() -> None:
    """Load the posterior, score the texts, and write the table and the figure."""
    (args,) = parse_arguments(Arguments)
    texts = texts_of(args.test, args.ood)
    directory = Path(args.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(args.posterior)
    model = BayesianModelForCausalLM.from_pretrained(args.posterior, members=args.members, base_model=args.base_model)
    model.to(PartialState().device)  # the device that training would use
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
                if measure == "total" or model.num_members > 1  # EU of one member is 0 everywhere
            }
    (directory / "results.json").write_text(json.dumps(results, indent=2))
    plot(found, results, directory)
    show(results, args.posterior, Console(width=100))


if __name__ == "__main__":
    main()
