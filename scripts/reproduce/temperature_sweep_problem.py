"""The settings of ``temperature_sweep``, and the model and the data that all its cells share."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    default_data_collator,
    set_seed,
)

from hf_bayes import BayesianModelForCausalLM, BayesianModelForSequenceClassification
from hf_bayes.cli.data import load_splits
from hf_bayes.cli.labels import labelled_text
from hf_bayes.cli.token_windows import token_windows
from scripts.reproduce import cnn_lstm, debian_text

POINTS = ("mle", "map")
METHODS = (*POINTS, "laplace_ef", "laplace_ggn", "mean_field", "sghmc_serial", "sghmc_parallel", "phases")


@dataclass
class Arguments:
    """The model, data, methods and settings of the sweep."""

    output_dir: str = field(metadata={"help": "Folder of the cells (and of the page's model and data)."})
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A folder or Hub model, every weight random. Default: a new CNN-LSTM."}
    )
    task: str = field(default="sequence_classification", metadata={"help": "Task: this, or causal_lm."})
    dataset: str | None = field(default=None, metadata={"help": "Training file, as for hf_bayes.cli.data.load_splits."})
    test_file: str | None = field(default=None, metadata={"help": "File of test rows. Default: the validation rows."})
    evaluate_on: str = field(default="test", metadata={"help": "test, or validation to choose settings."})
    validation_fraction: float = field(default=0.2, metadata={"help": "Share held out of the training file."})
    text_column: str = field(default="text")
    label_column: str = field(default="label")
    max_length: int = field(default=16, metadata={"help": "Tokens of a padded row, or of a window."})
    num_train: int | None = field(default=1000, metadata={"help": "n, rows to train on. None: all."})
    depth: int | None = field(default=None, metadata={"help": "num_hidden_layers of the model."})
    subspace: str = field(default="all", metadata={"help": "Random parameters."})
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    temperatures: list[float] = field(default_factory=lambda: [1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0])
    phase_temperatures: list[float] = field(default_factory=lambda: [1.0])
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    batch_size: int = field(default=32)
    prior_std: float = field(default=1.0)
    learning_rate: float = field(default=0.1, metadata={"help": "Learning rate of SGHMC and SGD."})
    momentum: float = field(default=0.98, metadata={"help": "Momentum of SGHMC and SGD."})
    preconditioner_batches: int = field(default=16, metadata={"help": "Updates of an estimate of SGHMC's masses."})
    num_steps: int = field(default=800, metadata={"help": "Updates of a chain."})
    burn_in: float = field(default=0.5)
    num_draws: int = field(default=4, metadata={"help": "Draws of the serial chain, one at the end of each cycle."})
    num_chains: int = field(default=4, metadata={"help": "Chains of sghmc_parallel."})
    adam_steps: int = field(default=500, metadata={"help": "Updates of MLE, MAP and mean-field VI."})
    adam_learning_rate: float = field(default=3e-3)
    init_std: float = field(default=0.1, metadata={"help": "Initial std of the mean-field Gaussian."})
    std_learning_rate: float = field(default=0.02)
    laplace_structure: str = field(
        default="low_rank", metadata={"help": "Covariance of Laplace. The CNN-LSTM allows only this one."}
    )
    laplace_rank: int = field(default=64)
    num_members: int = field(default=10, metadata={"help": "Draws of a Gaussian."})


Loaded = BayesianModelForCausalLM | BayesianModelForSequenceClassification


@dataclass
class Problem:
    """The model and data that all cells share."""

    args: Arguments
    model: str
    tokenizer: Any
    train: Dataset
    held_out: Dataset
    names: list[str]
    collate: Callable[..., Any]

    @property
    def causal(self) -> bool:
        return self.args.task == "causal_lm"

    def load(self) -> PreTrainedModel:
        """Return the model that every cell starts from."""
        settings: dict[str, Any] = {} if self.causal else {"num_labels": len(self.names)}
        if self.args.depth is not None:
            settings["num_hidden_layers"] = self.args.depth
        set_seed(0)  # a new head is then equal for all
        kind = AutoModelForCausalLM if self.causal else AutoModelForSequenceClassification
        model = kind.from_pretrained(self.model, **settings)
        model.config.pad_token_id = self.tokenizer.pad_token_id
        return model

    def load_posterior(self, directory: Path, members: int | None = None) -> Loaded:
        kind = BayesianModelForCausalLM if self.causal else BayesianModelForSequenceClassification
        return kind.from_pretrained(directory, members=members, base_model=self.load())


def prepare(args: Arguments) -> Problem:
    """Load the data, or make the data of the page's run."""
    root, model, dataset, test = Path(args.output_dir), args.model_name_or_path, args.dataset, args.test_file
    if dataset is None:
        train_file, test_file = debian_text.write(root / "data")
        dataset, test = str(train_file), str(test_file)
    splits = load_splits(
        dataset,
        validation_file=test if args.evaluate_on == "test" else None,
        validation_fraction=args.validation_fraction,
        text_column=args.text_column,
    ).rows
    if "validation" not in splits:
        raise ValueError(
            f"validation_fraction must lie strictly between 0 and 1 where no other rows are there to evaluate on, got "
            f"{args.validation_fraction}: raise it, or give --test_file and evaluate on that"
        )
    rows = len(splits["train"])
    splits["train"] = splits["train"].shuffle(seed=0).select(range(min(args.num_train or rows, rows)))
    if model is None:
        model = str(root / "model")
        sizes = {} if args.depth is None else {"num_hidden_layers": args.depth}
        num_labels = len(set(splits["train"][args.label_column]))
        cnn_lstm.build(Path(model), splits["train"][args.text_column], num_labels=num_labels, **sizes)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if args.task == "causal_lm":
        windows = {
            name: token_windows(part, tokenizer, length=args.max_length, text_column=args.text_column, join=True)
            for name, part in splits.items()
        }
        collate: Callable[..., Any] = default_data_collator
        return Problem(args, model, tokenizer, windows["train"], windows["validation"], [], collate)
    encoded, head = labelled_text(
        splits, tokenizer, text_column=args.text_column, label_column=args.label_column, max_length=args.max_length
    )
    collate = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=args.max_length)
    names = list(head["id2label"].values())
    return Problem(args, model, tokenizer, encoded["train"], encoded["validation"], names, collate)


def settings_key(args: Arguments) -> str:
    """Return a key of all settings except the looped ones: other settings have other cells."""
    loops = ("output_dir", "methods", "temperatures", "phase_temperatures", "seeds")
    fixed = {k: v for k, v in dataclasses.asdict(args).items() if k not in loops}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:8]
