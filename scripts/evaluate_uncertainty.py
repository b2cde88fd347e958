"""How good a posterior's uncertainty is: NLL and calibration on held-out text, and whether it knows other text as such.

    python scripts/evaluate_uncertainty.py --posterior out --test test.txt --ood code=code.txt rot13=rot13.txt

Texts are cut into windows of equal length. A window's score is the mean over its tokens of the total (TU) or epistemic
(EU) uncertainty; AUROC is that of telling a set's windows from the test text's. Writes results.json and a PNG.
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
from hf_bayes.cli.data import token_windows
from hf_bayes.cli.scripts import parse_arguments
from hf_bayes.metrics import ood_auroc, summarise
from hf_bayes.models.loading import load_tokenizer


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

    def __post_init__(self) -> None:
        for name in ("max_windows", "batch_size"):
            if (count := getattr(self, name)) < 1:
                raise ValueError(f"--{name} must be at least 1, got {count}: it counts windows of {self.length} tokens")


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


def main() -> None:
    """Load, score, tabulate, plot."""
    (args,) = parse_arguments(Arguments)
    texts = texts_of(args.test, args.ood)
    directory = Path(args.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(args.posterior)
    model = BayesianModelForCausalLM.from_pretrained(args.posterior, members=args.members, base_model=args.base_model)
    model.to(PartialState().device)  # an accelerator if there is one, as training would
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
