"""The last word of statements, in and out of distribution (posteriors section 5.3, Table 2), with a small model.

    python -m scripts.reproduce.last_word --base quickstart-output/last-word-base

The paper fine-tunes the last attention layer of Llama 3 on textbooks and predicts the last word of 100 statements, in
English and in Samoan. Here a small base model (docstrings) is fine-tuned on the language reference. Statements are
sentences of held-out topics. ROT13 gives the same sentences in a language that the model never saw.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, default_data_collator, set_seed
from transformers.utils import logging

from hf_bayes import BayesianTrainer, BayesianTrainingArguments
from hf_bayes.core.config import MethodConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from scripts.reproduce.accounts import account, accounts_table
from scripts.reproduce.last_word_scores import EDGES, measured, window_nll
from scripts.reproduce.last_word_statements import tasks
from scripts.reproduce.report import keep, spread, table

sys.path.append(str(Path(__file__).parents[1]))  # the quickstart's files import each other by name
from quickstart_base import pretrain_base, train_tokenizer, windows
from quickstart_corpora import corpora, package_docstrings

NAME = "last_word"
LOOKS = 20
"""The number of probes in each chain of a run, so that chains of one draw have an R-hat, too."""

PACKAGES = ("numpy", "sklearn", "matplotlib")
"""The packages whose docstrings join the standard library's for the base model. hf_bayes depends on them."""


@dataclass(frozen=True)
class Settings:
    """The sizes of a run, and the grid of the search on the validation topics.

    Attributes:
        updates: updates of each chain. The serial chain makes as many for burn-in, and as many again for its draws.
        members: chains, or draws of the serial chain.
        batch_size, length: windows of a minibatch, tokens of a window.
        statements: the largest number of statements of each text.
        rates: learning rates, in units of SGD.
        prior_stds: standard deviations of the prior. Its mean is the base model.
        searched: chains of parallel SGHMC in the search.
        validation: number of windows for the validation NLL of the search.
        num_seeds: number of seeds of the lines in the table. The search uses seed 0.
    """

    updates: int = 100
    members: int = 8
    batch_size: int = 2
    length: int = 128
    statements: int = 100
    rates: tuple[float, ...] = (1.0, 3.0)
    prior_stds: tuple[float, ...] = (0.03, 0.1)
    searched: int = 2
    validation: int = 24
    num_seeds: int = 3


def last_attention(base: Path) -> PreTrainedModel:
    """Return the base model with only its last attention layer trainable."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.requires_grad_(False)
    model.model.layers[-1].self_attn.requires_grad_(True)
    return model


class Choice(NamedTuple):
    """The choice on the validation topics, and its NLL there."""

    rate: float
    prior_std: float
    nll: float


def configured(fields: Mapping[str, Any], prior_std: float) -> MethodConfig:
    """Return SGHMC (at T = 0: SGD with momentum) with chains that start at the base model, the mean of the prior."""
    return SGHMCConfig(prior_std=prior_std, prior_mean="initial", init_jitter=0.0, **fields)


def lines(settings: Settings) -> dict[str, tuple[dict[str, Any], int]]:
    """Return name -> fields of SGHMC and updates of a chain. The ensemble's members differ by their minibatches."""
    members, updates = settings.members, settings.updates
    thin = max(1, updates // members)
    serial = {"num_chains": 1, "draws_per_chain": members, "burn_in": updates, "thin": thin}
    return {
        "SGD": ({"num_chains": 1, "temperature": 0.0}, updates),
        "deep ensemble": ({"num_chains": members, "temperature": 0.0}, updates),
        "serial SGHMC": (serial, updates + thin * members),
        "parallel SGHMC": ({"num_chains": members}, updates),
    }


def fine_tuned(
    method: MethodConfig, updates: int, rate: float, base: Path, rows: Any, settings: Settings, seed: int
) -> tuple[BayesianModel, dict[str, Any]]:
    """Return the model with the posterior of its last attention layer, and the diagnostics of the run."""
    set_seed(seed)
    with tempfile.TemporaryDirectory() as directory:
        trainer = BayesianTrainer(
            model=last_attention(base),
            method=method,
            args=BayesianTrainingArguments(
                output_dir=directory, learning_rate=rate, max_steps=updates, seed=seed, map_updates=0,
                per_device_train_batch_size=settings.batch_size, logging_strategy="no", save_strategy="no",
                report_to="none", disable_tqdm=True, trunk_memory_gib=1.0, probe_steps=max(1, updates // LOOKS),
            ),
            train_dataset=rows,
            data_collator=default_data_collator,
        )  # fmt: skip
        trainer.train()
    return trainer.bayesian, account(trainer.posterior.config.diagnostics)


def prepare_base(directory: Path, texts: Mapping[str, list[str]], length: int) -> Path:
    """Return the folder of a base model like the quickstart's with four times its training text. Make it if missing.

    The training is three passes over the standard library's docstrings, and one over the docstrings of three packages.
    The model has read nothing of the language reference, like the quickstart's model.
    """
    if not (directory / "config.json").exists():
        tokenizer = train_tokenizer(texts["pretrain"])
        further = package_docstrings(PACKAGES, [text for part in texts.values() for text in part])
        pretrain_base([*texts["pretrain"] * 3, *further], tokenizer, directory, length=length, epochs=1.0, seed=0)
    return directory


def search(fields: Mapping[str, Any], base: Path, rows: Mapping[str, Any], settings: Settings) -> list[Choice]:
    """Return the points of the grid, the best first."""
    found = []
    for rate in settings.rates:
        for prior_std in settings.prior_stds:
            method = configured(fields, prior_std)
            model, _ = fine_tuned(method, settings.updates, rate, base, rows["finetune"], settings, 0)
            found.append(Choice(rate, prior_std, window_nll(model, rows["validation"])))
            print(fields, found[-1], flush=True)
    return sorted(found, key=lambda choice: choice.nll)


def run(settings: Settings, base: Path) -> dict[str, Any]:
    """Make the base model, run the search, and run every line over the seeds."""
    logging.set_verbosity_error()
    texts = corpora()
    base = prepare_base(base, texts, settings.length)
    tokenizer = AutoTokenizer.from_pretrained(base)
    limits = {"finetune": None, "validation": settings.validation}
    rows = {name: windows(texts[name], tokenizer, length=settings.length, limit=n) for name, n in limits.items()}
    questions = tasks(texts, settings.statements)
    found: dict[str, list[dict[str, Any]]] = {"base": []}
    with attach(last_attention(base)) as model:
        before = window_nll(model, rows["validation"])
        found["base"].append(measured(model, tokenizer, questions))
    grid = {
        "optimised": search({"num_chains": 1, "temperature": 0.0}, base, rows, settings),
        "sampled": search({"num_chains": settings.searched}, base, rows, settings),
    }
    for name, (fields, updates) in lines(settings).items():
        best = grid["optimised" if fields.get("temperature") == 0 else "sampled"][0]
        found[name] = []
        for seed in range(settings.num_seeds):
            begin = time.perf_counter()
            method = configured(fields, best.prior_std)
            model, said = fine_tuned(method, updates, best.rate, base, rows["finetune"], settings, seed)
            seconds = time.perf_counter() - begin
            found[name].append(
                {
                    **measured(model, tokenizer, questions),
                    "validation": window_nll(model, rows["validation"]),
                    "diagnostics": said,
                    "seconds": seconds,
                }
            )
            print(
                name, seed, {key: found[name][-1][key] for key in ("loss", "auroc", "mean", "validation")}, flush=True
            )
    return {
        "settings": asdict(settings),
        "windows": {name: len(part) for name, part in rows.items()},
        "statements": {name: len(asked) for name, asked in questions.items()},
        "examples": {name: " | ".join(asked[0]) for name, asked in questions.items()},
        "validation": before,
        "grid": {name: [choice._asdict() for choice in choices] for name, choices in grid.items()},
        "lines": found,
    }


def _pair(found: Sequence[Mapping[str, Any]], name: str, digits: int = 3) -> list[str]:
    """Return the AUROC of TU and of EU over seeds. One member has no EU."""
    kinds = {kind: [one["auroc"][name][kind] for one in found] for kind in ("total", "epistemic")}
    no_eu = all(one["mean"]["test"]["epistemic"] < 1e-9 for one in found)
    return [spread(kinds["total"], digits), "-" if no_eu else spread(kinds["epistemic"], digits)]


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables: Table 2 with ROT13 instead of Samoan, the two further texts, and the search."""
    found = record["lines"]
    columns = [
        "",
        "loss in distribution",
        "loss ROT13",
        "AUROC of TU",
        "AUROC of EU",
        "mean TU",
        "mean EU",
        "validation",
    ]
    rows = []
    for name, seeds in found.items():
        losses = [spread([one["loss"][text] for one in seeds], 2) for text in ("test", "rot13")]
        total, epistemic = ([one["mean"]["test"][kind] for one in seeds] for kind in ("total", "epistemic"))
        held_out = [one.get("validation", record["validation"]) for one in seeds]
        rows.append([name, *losses, *_pair(seeds, "rot13"), spread(total, 2), spread(epistemic, 4), spread(held_out)])
    others = [[name, *_pair(seeds, "shuffled"), *_pair(seeds, "code")] for name, seeds in found.items()]
    searched = [
        ["SGD" if kind == "optimised" else "SGHMC", choice["rate"], choice["prior_std"], f"{choice['nll']:.4f}"]
        for kind, choices in record["grid"].items()
        for choice in choices
    ]
    return {
        "table": table(columns, rows),
        "others": table(["", "shuffled: TU", "shuffled: EU", "code: TU", "code: EU"], others),
        "diagnostics": accounts_table(
            {name: [one["diagnostics"] for one in seeds] for name, seeds in found.items() if name != "base"}
        ),
        "search": table(["", "learning rate", "prior_std", "NLL on validation windows"], searched),
    }


def figures(record: Mapping[str, Any], directory: Path) -> None:
    """Draw the paper's Figure 10: TU and EU of both languages, one row for each line (seed 0)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = record["lines"]
    figure, axes = plt.subplots(len(found), 2, figsize=(9, 2 * len(found)), layout="constrained", sharex="col")
    for row, (name, seeds) in zip(axes, found.items(), strict=True):
        for axis, (kind, short) in zip(row, (("total", "TU"), ("epistemic", "EU")), strict=True):
            for text, colour, label in (("test", "#4477AA", "English"), ("rot13", "#EE6677", "the same in ROT13")):
                axis.stairs(
                    seeds[0]["histogram"][kind][text], EDGES[kind], fill=True, alpha=0.6, color=colour, label=label
                )
            area = seeds[0]["auroc"]["rot13"][kind]
            if kind == "epistemic" and seeds[0]["mean"]["test"][kind] < 1e-9:
                axis.set_title(f"{name}: EU is 0 (one member)", fontsize=9)
            else:
                axis.set_title(f"{name}: AUROC of {short} {area:.2f}", fontsize=9)
            axis.set_ylabel("statements")
    axes[0, 0].legend(frameon=False, fontsize=8)
    axes[-1, 0].set_xlabel("total uncertainty of the last word (nats)")
    axes[-1, 1].set_xlabel("epistemic uncertainty of the last word (nats)")
    figure.savefig(directory / f"{NAME}.png", dpi=130)
    plt.close(figure)


def main() -> None:
    """Run at full size and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("last-word-base"), help="the base model; made if not there")
    torch.set_num_threads(1)
    arguments = parser.parse_args()
    keep(NAME, lambda: run(Settings(), arguments.base))


if __name__ == "__main__":
    main()
