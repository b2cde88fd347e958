"""Train a small model and posteriors over it in five minutes on two cores, without a network: from text to uncertainty.

    python scripts/quickstart.py

The script trains a tokenizer and a small Llama on the docstrings in CPython's standard library. It fine-tunes LoRA on
the language reference: plain fine-tuning, a deep ensemble of four, and ``BayesianTrainer`` with nothing set, which runs
four chains of SGHMC. No learning rate, prior or temperature is given: every run finds its own, and ends by fitting one
temperature of its predictions on validation text. The script compares them on test text, on source code (near out of
distribution) and on ROT13 (far), on which nothing is chosen. A new process loads the last posterior and generates.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from peft import LoraConfig, get_peft_model
from quickstart_base import pretrain_base, train_tokenizer, windows
from quickstart_corpora import corpora
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, set_seed

from hf_bayes import (
    BayesianTrainer,
    BayesianTrainingArguments,
    EnsembleConfig,
    MAPConfig,
    pipeline,
    print_record,
    to_html,
)
from hf_bayes.cli.commands.evaluate import EvaluationArguments, evaluate_quietly
from hf_bayes.cli.evaluate_windows import WindowArguments
from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.cli.progress import one_bar, without_messages
from hf_bayes.cli.quiet import hidden_bars, quiet_libraries
from hf_bayes.core.config import MethodConfig

COLUMNS = ("method", "members", "rate", "t", "NLL", "ECE", "code TU", "code EU", "rot13 TU", "rot13 EU", "seconds")
"""rate: AdamW's learning rate; t: the temperature of the mixture; TU and EU: AUROCs of the two uncertainties."""
OTHER = ("code", "rot13")
PROMPTS = ["The following statement", "A class definition"]


@dataclass
class Arguments:
    """The sizes of the run."""

    output_dir: str = field(default="quickstart-output", metadata={"help": "Parent folder of all output."})
    updates: int = field(default=150, metadata={"help": "Updates of each chain."})
    base_epochs: float = field(default=1.25, metadata={"help": "Epochs of the base model."})
    batch_size: int = field(default=4, metadata={"help": "Windows in a minibatch of each chain."})
    length: int = field(default=128, metadata={"help": "Tokens of a window."})
    validation_windows: int = field(default=60, metadata={"help": "Windows that a run chooses by."})
    test_windows: int = field(default=60, metadata={"help": "Windows of each text that are scored."})
    seed: int = field(default=0, metadata={"help": "Seed of the whole run."})
    show: str | None = field(default=None, metadata={"help": "Only generate from this posterior and render."})


class Contender(NamedTuple):
    """A way to fine-tune.

    Attributes:
        method: a config; None leaves the choice to the run.
        updates: of each chain.
    """

    method: MethodConfig | None
    updates: int


def contenders(args: Arguments) -> dict[str, Contender]:
    """Return name -> contender. The last one is shown."""
    return {
        "plain": Contender(MAPConfig(), args.updates),
        "plain, 4 x longer": Contender(MAPConfig(), 4 * args.updates),
        "deep ensemble of 4": Contender(EnsembleConfig(num_chains=4), args.updates),
        "nothing set": Contender(None, args.updates),
    }


class Trained(NamedTuple):
    """A saved posterior, the learning rate that AdamW had in its run, the method, and the seconds of the run."""

    directory: Path
    learning_rate: float
    method: str
    seconds: float


def fine_tune(name: str, args: Arguments, base: Path, texts: Mapping[str, list[str]]) -> Trained:
    """Train one contender, and save its posterior."""
    begin = time.perf_counter()
    contender = contenders(args)[name]
    directory = Path(args.output_dir) / name.replace(",", "").replace(" ", "-")
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    trainer = BayesianTrainer(
        model=get_peft_model(model, lora),
        method=contender.method,
        args=BayesianTrainingArguments(
            output_dir=str(directory),
            max_steps=contender.updates,
            per_device_train_batch_size=args.batch_size,
            map_updates=0,  # the first row of the table is the comparison
            disable_tqdm=False,
            save_strategy="no",
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=windows(texts["finetune"], tokenizer, length=args.length),
        eval_dataset=windows(texts["validation"], tokenizer, length=args.length, limit=args.validation_windows),
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    one_bar(trainer)
    trainer.train()
    trainer.save_model()
    method = trainer.posterior.config.method
    words = f"{method['name']} at T = {method['temperature']:g}"
    return Trained(directory, trainer.adamw_learning_rate, words, time.perf_counter() - begin)


def evaluate(directory: Path, args: Arguments, *, calibrated: bool = True) -> dict[str, Any]:
    """Load a posterior, and score test text and other text."""
    files = {name: f"{args.output_dir}/{name}.txt" for name in ("test", *OTHER)}
    return evaluate_quietly(
        EvaluationArguments(
            posterior=str(directory),
            test=files["test"],
            ood=[f"{name}={files[name]}" for name in OTHER],
            calibrated=calibrated,
            output_dir=str(directory / ("evaluation" if calibrated else "evaluation-without-temperature")),
        ),
        WindowArguments(length=args.length, max_windows=args.test_windows),
    )


def cells(found: Mapping[str, Any], trained: Trained) -> list[str]:
    """Return a row of the table, without its name."""
    areas = [found["auroc"][text].get(kind) for text in OTHER for kind in ("total", "epistemic")]
    chosen = [f"{trained.learning_rate:.2g}", f"{found['temperature']:.3f}"]
    scores = [f"{found['nll']:.4f}", f"{found['ece']:.4f}"]
    seconds = f"{trained.seconds:.0f}"
    return [f"{found['members']}", *chosen, *scores, *("-" if a is None else f"{a:.3f}" for a in areas), seconds]


def show(directory: str, output_dir: str) -> None:
    """Load a posterior, generate and render. This runs in a new process."""
    generate = pipeline("bayesian-text-generation", directory)
    set_seed(0)
    records = [record[0] for record in generate(PROMPTS, max_new_tokens=60, do_sample=True, temperature=0.7)]
    print_record(records[0])
    (Path(output_dir) / "generated.html").write_text(to_html(records, title="Epistemic uncertainty, token by token"))


def compare(args: Arguments, console: Console) -> Path:
    """Pretrain, fine-tune in four ways, evaluate each, and print one table. Return the last posterior."""
    texts, output = corpora(), Path(args.output_dir)
    tokenizer = train_tokenizer(texts["pretrain"])
    console.print("A base model is trained on the standard library's docstrings.")
    base = pretrain_base(
        texts["pretrain"], tokenizer, output / "base", length=args.length, epochs=args.base_epochs, seed=args.seed
    )
    console.print(f"{base['parameters'] / 1e6:.1f} million parameters, {base['seconds']:.0f} s")
    for name in ("test", *OTHER):
        (output / f"{name}.txt").write_text("\n".join(texts[name]), encoding="utf-8")
    table = Table(title="Test text, and telling other text from it (AUROC)")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for name in contenders(args):
        console.print(f"Fine-tuning: {name}")
        trained = fine_tune(name, args, output / "base", texts)
        if name == "plain":
            table.add_row(name, *cells(evaluate(trained.directory, args, calibrated=False), trained))
            name += ", with t"
        table.add_row(name, *cells(evaluate(trained.directory, args), trained))
    console.print(f"With nothing set, the run has chosen {trained.method}")
    console.print(table)
    return trained.directory


def main() -> None:
    """Compare ways to fine-tune, and generate from the last posterior in a new process."""
    (args,) = parse_arguments(Arguments)
    start, console = time.perf_counter(), Console(width=120)
    # the rows of plain fine-tuning have one member, as their names say
    warnings.filterwarnings("ignore", message=".*1 member: (its )?epistemic uncertainty")
    logging.getLogger("hf_bayes.training.trainer").addFilter(lambda record: "has 1 member" not in record.getMessage())
    with quiet_libraries(), hidden_bars(), without_messages():
        if args.show:
            return show(args.show, args.output_dir)
        directory = compare(args, console)
    console.print("The last posterior, loaded in a new process:")
    subprocess.run([sys.executable, __file__, "--show", directory, "--output_dir", args.output_dir], check=True)
    console.print(
        f"{time.perf_counter() - start:.0f} s. Look at {args.output_dir}/generated.html, {directory}/evaluation"
    )


if __name__ == "__main__":
    main()
