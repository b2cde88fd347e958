"""Train a small model and posteriors over it in ten minutes on two cores, without a network: from text to uncertainty.

    python scripts/quickstart.py

The script trains a tokenizer and a small Llama on the docstrings in CPython's standard library. It fine-tunes LoRA on
the language reference into a MAP estimate, a deep ensemble, and SGHMC posteriors (serial and parallel), with the same
number of updates for every member. It loads each posterior in a new process and generates text. Then it compares them
on held-out text, on source code (near out of distribution) and on ROT13 (far). No setting is chosen on the evaluation
sets.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from peft import LoraConfig, get_peft_model
from quickstart_base import pretrain_base, train_tokenizer, windows
from quickstart_corpora import corpora
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, set_seed
from transformers.utils import logging

from hf_bayes import METHODS, BayesianTrainer, BayesianTrainingArguments, pipeline, print_record, to_html
from hf_bayes.cli.arguments import parse_arguments

SCRIPTS = Path(__file__).parent
PROMPTS = ["The following statement", "A class definition"]


@dataclass
class Arguments:
    """The sizes of the run. A few settings were tried by NLL on the validation text, without a systematic search."""

    output_dir: str = field(default="quickstart-output", metadata={"help": "Parent folder of all output."})
    updates: int = field(default=60, metadata={"help": "Updates of every member, warm start included."})
    members: int = field(default=8, metadata={"help": "Chains, or draws of the serial chain."})
    batch_size: int = field(default=4, metadata={"help": "Windows in a minibatch of each chain."})
    learning_rate: float = field(default=0.1, metadata={"help": "Learning rate of SGHMC, in units of SGD."})
    adam_learning_rate: float = field(default=3e-3, metadata={"help": "The same for MAP, ensemble and warm start."})
    prior_std: float = field(default=0.05, metadata={"help": "Std of the prior of every LoRA parameter."})
    length: int = field(default=128, metadata={"help": "Tokens of a window."})
    seed: int = field(default=0, metadata={"help": "Seed of the whole run."})
    show: str | None = field(default=None, metadata={"help": "Only generate from this posterior and render."})


def contenders(args: Arguments) -> dict[str, tuple[str, dict, int]]:
    """Return name -> (method, its fields, updates of a chain). Every member costs ``args.updates`` updates."""
    warm = {"warm_start_steps": args.updates // 2, "warm_start_learning_rate": args.adam_learning_rate}
    serial = {
        **warm,
        "num_chains": 1,
        "draws_per_chain": args.members,
        "thin": args.updates,
        "burn_in": args.updates // 2,
    }
    return {
        "MAP": ("map", {}, args.updates),
        "deep ensemble": ("ensemble", {"num_chains": args.members}, args.updates),
        "SGHMC serial": ("sghmc", serial, args.updates * args.members),
        "SGHMC parallel": ("sghmc", {**warm, "num_chains": args.members}, args.updates),
    }


def fine_tune(name: str, args: Arguments, base: Path, texts: dict[str, list[str]]) -> Path:
    """Train one contender, save its posterior, and return the directory."""
    method, fields, updates = contenders(args)[name]
    directory = Path(args.output_dir) / name.lower().replace(" ", "-")
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    trainer = BayesianTrainer(
        model=get_peft_model(model, lora),
        method=METHODS[method](prior_std=args.prior_std, **fields),
        args=BayesianTrainingArguments(
            output_dir=str(directory),
            learning_rate=args.learning_rate if method == "sghmc" else args.adam_learning_rate,
            max_steps=updates,
            per_device_train_batch_size=args.batch_size,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=windows(texts["finetune"], tokenizer, length=args.length),
        eval_dataset=windows(texts["validation"], tokenizer, length=args.length, limit=40),
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    return directory


def evaluate(directory: Path, output: Path, args: Arguments) -> dict:
    """Score held-out and other text in a new process."""
    command = [sys.executable, SCRIPTS / "evaluate_uncertainty.py", "--posterior", directory]
    command += ["--test", output / "test.txt", "--length", str(args.length), "--max_windows", "120"]
    command += ["--ood", *(f"{text}={output / text}.txt" for text in ("code", "rot13"))]
    subprocess.run([*command, "--output_dir", directory / "evaluation"], check=True)
    return json.loads((directory / "evaluation" / "results.json").read_text())


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
    start, console, output = time.perf_counter(), Console(width=100), Path(args.output_dir)
    logging.set_verbosity_error()
    texts, base = corpora(), output / "base"
    tokenizer = train_tokenizer(texts["pretrain"])
    console.rule("A base model from the standard library's docstrings")
    console.print(pretrain_base(texts["pretrain"], tokenizer, base, length=args.length, seed=args.seed))
    for name in ("test", "code", "rot13"):
        (output / f"{name}.txt").write_text("\n".join(texts[name]), encoding="utf-8")
    table = Table(title="Held-out text, and telling other text from it (AUROC)")
    for column in ("method", "members", "NLL", "ECE", "code TU", "code EU", "rot13 TU", "rot13 EU", "seconds"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name in contenders(args):
        console.rule(name)
        begin = time.perf_counter()
        directory = fine_tune(name, args, base, texts)
        seconds = time.perf_counter() - begin
        found = evaluate(directory, output, args)
        areas = [found["auroc"][text].get(m) for text in ("code", "rot13") for m in ("total", "epistemic")]
        cells = ["-" if area is None else f"{area:.3f}" for area in areas]
        numbers = f"{found['members']}", f"{found['nll']:.4f}", f"{found['ece']:.4f}"
        table.add_row(name, *numbers, *cells, f"{seconds:.0f}")
    console.rule("Loaded in a new process")
    subprocess.run([sys.executable, __file__, "--show", directory, "--output_dir", output], check=True)
    console.print(table)
    console.print(f"{time.perf_counter() - start:.0f} s. Look at {output}/generated.html, {directory}/evaluation")


if __name__ == "__main__":
    main()
