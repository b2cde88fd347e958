"""Train a small model and posteriors over it in about five minutes on two cores, without a network.

    python scripts/quickstart.py

The script trains a tokenizer and a small Llama on the docstrings in CPython's standard library. It fine-tunes LoRA on
the language reference: plain fine-tuning, a deep ensemble of four, and ``BayesianTrainer`` with nothing set, which runs
four chains of SGHMC. No learning rate, prior or temperature is given: every run finds its own, and ends by fitting one
temperature of its predictions on validation text. The script compares them on test text, on source code (near out of
distribution) and on ROT13 (far), on which nothing is chosen. A new process loads the last posterior and generates.

Two runs go at a time, in a process each with half of the threads: the model is too small to keep two cores busy alone.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from quickstart_base import pretrain_base, train_tokenizer, windows
from quickstart_corpora import corpora
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)

from hf_bayes import (
    BayesianTrainer,
    BayesianTrainingArguments,
    EnsembleConfig,
    MAPConfig,
    pipeline,
    print_record,
    to_html,
)
from hf_bayes.cli.commands.evaluate import measure, write
from hf_bayes.cli.evaluation.case import TEST, Target
from hf_bayes.cli.evaluation.windows import WINDOW_CASE, WindowArguments
from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.cli.progress import one_bar, without_messages
from hf_bayes.cli.quiet import hidden_bars, quiet_libraries
from hf_bayes.core.config import MethodConfig
from hf_bayes.models.base import BayesianModel

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
    """Return name -> contender. The last one is shown, and takes longest."""
    return {
        "plain": Contender(MAPConfig(), args.updates),
        "plain, 4 x longer": Contender(MAPConfig(), 4 * args.updates),
        "deep ensemble of 4": Contender(EnsembleConfig(num_chains=4), args.updates),
        "nothing set": Contender(None, args.updates),
    }


class Texts(NamedTuple):
    """The base model, its tokenizer, and the windows of every text that is used after it.

    Attributes:
        base: the folder of the base model.
        tokenizer: its tokenizer.
        train, validation: for the runs.
        scored: name -> windows for the table, "test" first.
    """

    base: Path
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    validation: Dataset
    scored: dict[str, Dataset]


class Trained(NamedTuple):
    """A posterior in memory and its folder, the learning rate that AdamW had, the method, and the seconds of the run.

    The model predicts as one that is loaded from the folder.
    """

    model: BayesianModel
    directory: Path
    learning_rate: float
    method: str
    seconds: float


def read_texts(texts: Mapping[str, list[str]], args: Arguments, base: Path) -> Texts:
    """Write the texts to files, and cut them into windows, once for all runs."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    for name in ("finetune", "validation", TEST, *OTHER):
        (base.parent / f"{name}.txt").write_text("\n".join(texts[name]), encoding="utf-8")
    files = {name: str(base.parent / f"{name}.txt") for name in (TEST, *OTHER)}
    scored = WindowArguments(length=args.length, max_windows=args.test_windows)
    return Texts(
        base,
        tokenizer,
        windows(texts["finetune"], tokenizer, length=args.length),
        windows(texts["validation"], tokenizer, length=args.length, limit=args.validation_windows),
        WINDOW_CASE.read(files, tokenizer, Target({}, None), scored),
    )


def fine_tune(name: str, args: Arguments, texts: Texts) -> Trained:
    """Train one contender, and save its posterior."""
    begin = time.perf_counter()
    contender = contenders(args)[name]
    directory = Path(args.output_dir) / name.replace(",", "").replace(" ", "-")
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(texts.base)
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    trainer = BayesianTrainer(
        model=get_peft_model(model, lora),
        method=contender.method,
        args=BayesianTrainingArguments(
            output_dir=str(directory),
            max_steps=contender.updates,
            per_device_train_batch_size=args.batch_size,
            map_updates=0,  # the first row of the table is the comparison
            disable_tqdm=True,  # one bar counts the runs
            save_strategy="no",
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=texts.train,
        eval_dataset=texts.validation,
        data_collator=default_data_collator,
        processing_class=texts.tokenizer,
    )
    one_bar(trainer)
    trainer.train()
    trainer.save_model()
    method = trainer.posterior.config.method
    words = f"{method['name']} at T = {method['temperature']:g}"
    seconds = time.perf_counter() - begin
    return Trained(trainer.bayesian.eval(), directory, trainer.adamw_learning_rate, words, seconds)


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
    settings = {"max_new_tokens": 60, "do_sample": True, "temperature": 0.7, "batch_size": len(PROMPTS)}
    records = [record[0] for record in generate(PROMPTS, **settings)]
    print_record(records[0])
    (Path(output_dir) / "generated.html").write_text(to_html(records, title="Epistemic uncertainty, token by token"))


class Outcome(NamedTuple):
    """The rows of the table, the folder of the posterior and the method of a run."""

    rows: list[list[str]]
    directory: Path
    method: str


def run(name: str, args: Arguments, texts: Texts, threads: int) -> Outcome:
    """Train one contender, evaluate it, and draw the figure of the last one. This runs in a process of its own."""
    torch.set_num_threads(threads)
    with quiet():
        trained = fine_tune(name, args, texts)
        model, rows = trained.model, []
        if name == "plain":
            with model.showing(model.current, temperature=1.0):
                _, results = measure(model, texts.scored, WINDOW_CASE, default_data_collator, hide=True)
            rows.append([name, *cells(results, trained)])
        found, results = measure(model, texts.scored, WINDOW_CASE, default_data_collator, hide=True)
        rows.append([name + ", with t" * bool(rows), *cells(results, trained)])
        if name == list(contenders(args))[-1]:
            write(found, results, WINDOW_CASE, trained.directory / "evaluation")
    return Outcome(rows, trained.directory, trained.method)


def run_all(args: Arguments, texts: Texts) -> dict[str, Outcome]:
    """Return name -> outcome. Two contenders run at a time, the longest first."""
    names = list(contenders(args))
    workers = min(2, os.cpu_count() or 1)
    threads = max(1, torch.get_num_threads() // workers)
    # a forked process could hang in the threads of its parent
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run, name, args, texts, threads): name for name in reversed(names)}
        found = {running[done]: done.result() for done in tqdm(as_completed(running), "runs", len(names), leave=False)}
    return {name: found[name] for name in names}


def compare(args: Arguments, console: Console) -> Path:
    """Pretrain, fine-tune in four ways, evaluate each, and print one table. Return the last posterior."""
    texts, output = corpora(), Path(args.output_dir)
    tokenizer = train_tokenizer(texts["pretrain"])
    console.print("A base model is trained on the standard library's docstrings.")
    base = pretrain_base(
        texts["pretrain"], tokenizer, output / "base", length=args.length, epochs=args.base_epochs, seed=args.seed
    )
    console.print(f"{base['parameters'] / 1e6:.1f} million parameters, {base['seconds']:.0f} s")
    console.print(f"It is fine-tuned, two runs at a time: {'; '.join(contenders(args))}")
    found = run_all(args, read_texts(texts, args, output / "base"))
    table = Table(title="Test text, and telling other text from it (AUROC)")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for outcome in found.values():
        for row in outcome.rows:
            table.add_row(*row)
    console.print(f"With nothing set, the run has chosen {outcome.method}")
    console.print(table)
    return outcome.directory


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out bars and messages of libraries and runs, and the warning about one member, which is meant to be one."""
    logger = logging.getLogger("hf_bayes.training.trainer")

    def says_more(record: logging.LogRecord) -> bool:
        return "has 1 member" not in record.getMessage()

    warnings.filterwarnings("ignore", message=".*1 member: (its )?epistemic uncertainty")
    logger.addFilter(says_more)
    try:
        with quiet_libraries(), hidden_bars(), without_messages():
            yield
    finally:
        logger.removeFilter(says_more)


def main() -> None:
    """Compare ways to fine-tune, and generate from the last posterior in a new process."""
    (args,) = parse_arguments(Arguments)
    start, console = time.perf_counter(), Console(width=120)
    with quiet():
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
