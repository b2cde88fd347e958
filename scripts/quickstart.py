"""Train a small model and posteriors over it in ten minutes on two cores, without a network: from text to uncertainty.

    python scripts/quickstart.py

The script trains a tokenizer and a small Llama on the docstrings in CPython's standard library. It fine-tunes LoRA on
the language reference: plain fine-tuning, a deep ensemble of four, and ``BayesianTrainer`` with nothing set, which runs
four chains of SGHMC. No learning rate, prior or temperature is given: every run finds its own, prints it, and ends by
fitting one temperature of its predictions on validation text. The script loads each posterior in a new process and
compares them on test text, on source code (near out of distribution) and on ROT13 (far). Nothing is chosen on these.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from peft import LoraConfig, get_peft_model
from quickstart_base import pretrain_base, train_tokenizer, windows
from quickstart_corpora import corpora
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, set_seed
from transformers.utils import logging

from hf_bayes import (
    BayesianTrainer,
    BayesianTrainingArguments,
    EnsembleConfig,
    MAPConfig,
    pipeline,
    print_record,
    to_html,
)
from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.core.config import MethodConfig

SCRIPTS = Path(__file__).parent
COLUMNS = ("method", "members", "rate", "t", "NLL", "ECE", "code TU", "code EU", "rot13 TU", "rot13 EU", "seconds")
"""rate: AdamW's learning rate; t: the temperature of the mixture; TU and EU: AUROCs of the two uncertainties."""
PROMPTS = ["The following statement", "A class definition"]


@dataclass
class Arguments:
    """The sizes of the run."""

    output_dir: str = field(default="quickstart-output", metadata={"help": "Parent folder of all output."})
    updates: int = field(default=240, metadata={"help": "Updates of each chain."})
    batch_size: int = field(default=4, metadata={"help": "Windows in a minibatch of each chain."})
    length: int = field(default=128, metadata={"help": "Tokens of a window."})
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
        "plain fine-tuning": Contender(MAPConfig(), args.updates),
        "plain, 4 times as long": Contender(MAPConfig(), 4 * args.updates),
        "deep ensemble of 4": Contender(EnsembleConfig(num_chains=4), args.updates),
        "nothing set": Contender(None, args.updates),
    }


class Trained(NamedTuple):
    """A saved posterior, the learning rate that AdamW had in its run, and the seconds of the run."""

    directory: Path
    learning_rate: float
    seconds: float


def fine_tune(name: str, args: Arguments, base: Path, texts: dict[str, list[str]]) -> Trained:
    """Train one contender, and save its posterior."""
    begin = time.perf_counter()
    contender = contenders(args)[name]
    directory = Path(args.output_dir) / name.lower().replace(" ", "-")
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
            disable_tqdm=False,  # the lines that say what was chosen stand beside the progress bar
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=windows(texts["finetune"], tokenizer, length=args.length),
        eval_dataset=windows(texts["validation"], tokenizer, length=args.length),
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    return Trained(directory, trainer.adamw_learning_rate, time.perf_counter() - begin)


def evaluate(directory: Path, output: Path, args: Arguments, *, calibrated: bool = True) -> dict:
    """Score test text and other text in a new process."""
    results = directory / ("evaluation" if calibrated else "evaluation-without-temperature")
    command = [sys.executable, SCRIPTS / "evaluate_uncertainty.py", "--posterior", directory]
    command += ["--test", output / "test.txt", "--length", str(args.length), "--max_windows", "120"]
    command += ["--ood", *(f"{text}={output / text}.txt" for text in ("code", "rot13"))]
    command += ["--calibrated", str(calibrated), "--output_dir", results]
    subprocess.run(command, check=True)
    return json.loads((results / "results.json").read_text())


def cells(found: dict, trained: Trained) -> list[str]:
    """Return a row of the table, without its name."""
    areas = [found["auroc"][text].get(kind) for text in ("code", "rot13") for kind in ("total", "epistemic")]
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


def main() -> None:
    """Pretrain, fine-tune in four ways, evaluate each in a new process, and print one table."""
    (args,) = parse_arguments(Arguments)
    if args.show:
        return show(args.show, args.output_dir)
    start, console, output = time.perf_counter(), Console(width=120), Path(args.output_dir)
    logging.set_verbosity_error()
    texts, base = corpora(), output / "base"
    tokenizer = train_tokenizer(texts["pretrain"])
    console.rule("A base model from the standard library's docstrings")
    console.print(pretrain_base(texts["pretrain"], tokenizer, base, length=args.length, seed=args.seed))
    for name in ("test", "code", "rot13"):
        (output / f"{name}.txt").write_text("\n".join(texts[name]), encoding="utf-8")
    table = Table(title="Test text, and telling other text from it (AUROC)")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right")
    for name in contenders(args):
        console.rule(name)
        trained = fine_tune(name, args, base, texts)
        directory = trained.directory
        if name == "plain fine-tuning":
            table.add_row(name, *cells(evaluate(directory, output, args, calibrated=False), trained))
            name += ", temperature"
        table.add_row(name, *cells(evaluate(directory, output, args), trained))
    console.rule("Loaded in a new process")
    subprocess.run([sys.executable, __file__, "--show", directory, "--output_dir", output], check=True)
    console.print(table)
    console.print(f"{time.perf_counter() - start:.0f} s. Look at {output}/generated.html, {directory}/evaluation")


if __name__ == "__main__":
    main()
