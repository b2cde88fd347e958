"""Make the examples in ``model_cards/``: the card of one small, real run of each kind, and its configuration.

    python scripts/model_cards.py --render_only true        # render the cards again from their configurations
    python scripts/model_cards.py                           # run the training first

The training needs the base model and tokenizer that ``make quickstart`` writes to ``quickstart-output/base``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets
from peft import LoraConfig, get_peft_model
from quickstart_base import windows
from quickstart_corpora import corpora
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    default_data_collator,
    set_seed,
)

from hf_bayes import BayesianTrainer, BayesianTrainingArguments, LaplaceConfig, Posterior, SGHMCConfig
from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.core.config import MethodConfig
from hf_bayes.posteriors.model_card import render_card

CARDS = Path(__file__).parents[1] / "model_cards"
AUTHOR = {"license": "apache-2.0", "language": "en", "tags": ["example"]}
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
CLASSES = ("pretrain", "finetune", "code")  # docstrings, language reference, source code


@dataclass
class Arguments:
    """The folders and the lengths of the runs."""

    base: str = field(default="quickstart-output/base", metadata={"help": "Directory of the base model."})
    output_dir: str = field(default="model-cards-output", metadata={"help": "Parent folder of the posteriors."})
    updates: int = field(default=60, metadata={"help": "Updates of every chain."})
    length: int = field(default=64, metadata={"help": "Tokens of a window."})
    only: str | None = field(default=None, metadata={"help": "Name of the only example to make. Default: all."})
    render_only: bool = field(default=False, metadata={"help": "Render the cards again without training."})


@dataclass
class Kind:
    """A run behind an example: data, method, and random parameters."""

    data: Callable[..., dict[str, Dataset]]
    method: MethodConfig
    learning_rate: float
    lora: bool = True
    prior: str | None = None
    subspace: str = "trainable"


def text(corpus: str) -> Callable[..., dict[str, Dataset]]:
    """Return the training and held-out windows of a corpus for language modelling."""

    def rows(texts: dict[str, list[str]], tokenizer: Any, length: int) -> dict[str, Dataset]:
        found = windows(texts[corpus], tokenizer, length=length, limit=360)
        return found.train_test_split(60, shuffle=False)

    return rows


def classes(texts: dict[str, list[str]], tokenizer: Any, length: int) -> dict[str, Dataset]:
    """Return the training and held-out rows for classification by kind of text."""
    parts = []
    for label, corpus in enumerate(CLASSES):
        part = windows(texts[corpus], tokenizer, length=length, limit=100).remove_columns("labels")
        parts.append(part.add_column("label", [label] * len(part)))
    return concatenate_datasets(parts).train_test_split(90, seed=0)


def kinds(updates: int) -> dict[str, Kind]:
    """Return the name of each example -> its run."""
    warm = {"warm_start_steps": updates // 2, "warm_start_learning_rate": 3e-3, "prior_std": 0.05}
    laplace = {"structure": "kronecker", "prior_std": 0.05}
    return {
        "draws_lora": Kind(text("finetune"), SGHMCConfig(num_chains=4, draws_per_chain=4, **warm), 0.1),
        "gaussian_lora": Kind(text("finetune"), LaplaceConfig(**laplace), 3e-3),
        "last_layer": Kind(
            classes, LaplaceConfig(structure="full", prior_std=0.1), 0.01, lora=False, subspace="last_layer"
        ),
        "classifier": Kind(classes, SGHMCConfig(num_chains=4, draws_per_chain=2, **warm), 0.02),
        "continual": Kind(text("code"), LaplaceConfig(structure="kronecker"), 3e-3, prior="gaussian_lora"),
    }


def run(name: str, kind: Kind, args: Arguments, texts: dict[str, list[str]]) -> Posterior:
    """Train one example and save its posterior."""
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    classifier = kind.data is classes
    build: Any = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    names = {"id2label": dict(enumerate(("docstring", "reference", "code")))} if classifier else {}
    model = build.from_pretrained(args.base, **names)
    if kind.lora:
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS" if classifier else "CAUSAL_LM", **LORA))
    rows = kind.data(texts, tokenizer, args.length)
    trainer = BayesianTrainer(
        model, kind.method,
        BayesianTrainingArguments(
            str(Path(args.output_dir) / name), learning_rate=kind.learning_rate, max_steps=args.updates,
            per_device_train_batch_size=8, save_strategy="no", logging_strategy="no", report_to="none", probe_steps=5,
        ),
        train_dataset=rows["train"], eval_dataset=rows["test"], data_collator=default_data_collator,
        processing_class=tokenizer, subspace=kind.subspace,
        prior=None if kind.prior is None else str(Path(args.output_dir) / kind.prior),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return trainer.posterior


def main() -> None:
    """Train the examples and render their cards."""
    (args,) = parse_arguments(Arguments)
    CARDS.mkdir(exist_ok=True)
    texts = {} if args.render_only else corpora()
    for name, kind in kinds(args.updates).items():
        if args.only not in (None, name):
            continue
        file = CARDS / f"{name}.json"
        if not args.render_only:
            posterior = run(name, kind, args, texts)
            config = posterior.config.to_dict()
            config["base_model"]["name_or_path"] = "./docstring-llama"  # instead of a path of this computer
            if kind.prior is not None:
                config["prior"]["posterior"] = f"./{kind.prior}"
            example = {"adapter": kind.lora, "repo_id": f"user/{name.replace('_', '-')}", "author": AUTHOR}
            example["custom_generate"] = name == "draws_lora"  # as hf-bayes export --custom_generate writes it
            file.write_text(json.dumps({**example, "config": config}, indent=1) + "\n")
        example = json.loads(file.read_text())
        given = {name: example[name] for name in ("adapter", "repo_id", "custom_generate")} | example["author"]
        file.with_suffix(".md").write_text(render_card(example["config"], **given))


if __name__ == "__main__":
    main()
