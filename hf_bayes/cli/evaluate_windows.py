"""The evaluation of a language model: statistics of the tokens in windows of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hf_bayes.cli.token_windows import token_windows
from hf_bayes.models.causal_lm import BayesianModelForCausalLM


@dataclass
class WindowArguments:
    """The windows of a language model."""

    length: int = field(default=128, metadata={"help": "Language models: tokens of a window."})
    max_windows: int = field(
        default=200, metadata={"help": "Language models: largest number of windows of each text, evenly spread."}
    )

    def __post_init__(self) -> None:
        if self.max_windows < 1:
            raise ValueError(f"--max_windows must be at least 1, got {self.max_windows}: it counts windows of a text")


def windows_of(path: str, tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int) -> Tensor:
    """Return token ids [windows, length] without overlap.

    Raises:
        ValueError: for a text shorter than a window.
    """
    text = Dataset.from_dict({"text": [Path(path).read_text(encoding="utf-8")]})
    rows = token_windows(text, tokenizer, length=length, join=True)
    whole = [row["input_ids"] for row in rows if len(row["input_ids"]) == length]
    if not whole:
        raise ValueError(f"{path} is shorter than one window of {length} tokens: give more text or a smaller --length")
    count = min(limit, len(whole))
    return torch.tensor([whole[i * len(whole) // count] for i in range(count)])


@torch.no_grad()
def evaluate_windows(
    model: BayesianModelForCausalLM, sets: Mapping[str, Tensor], *, batch_size: int
) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Return the statistics of ``evaluate_batch`` for each set, each [windows, length - 1].

    Args:
        sets: name -> token ids [windows, length].
        batch_size: windows of a batch.
    """
    found = {}
    for name, windows in sets.items():
        pieces = []
        for batch in tqdm(windows.to(model.device).split(batch_size), desc=name, leave=False):
            statistics, _ = model.evaluate_batch({"input_ids": batch, "labels": batch})
            statistics.pop("member_log_lik", None)
            pieces.append({key: value.cpu().double().view(len(batch), -1) for key, value in statistics.items()})
        found[name] = {key: torch.cat([piece[key] for piece in pieces]).numpy() for key in pieces[0]}
    return found
