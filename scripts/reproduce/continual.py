"""Continual learning on four texts of Debian packages: does a posterior as the next prior prevent forgetting?

    python -m scripts.reproduce.continual

This repeats section 5.2 and appendix E of the posteriors paper (20 books, Llama 2) with the small base model of the
quickstart. ``hf-bayes continual`` makes every update of every method. This file fetches the texts, chooses lambda
on the first episode, repeats over seeds and orders, and compares pairs. The same command continues an interrupted run.
"""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import hashlib
import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy
from transformers.utils import logging

from hf_bayes import BayesianTrainingArguments
from hf_bayes.cli.commands import continual as command
from hf_bayes.cli.continual_arguments import ContinualArguments, LoraArguments
from hf_bayes.cli.continual_results import Results, draw_average, draw_losses, excess, forgotten
from hf_bayes.cli.data import load_episode
from hf_bayes.cli.parsing import parse_arguments
from scripts.reproduce import report

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts import each other by name

from quickstart_base import pretrain_base, train_tokenizer
from quickstart_corpora import corpora

NAME = "continual"
METHODS = ("sequential", "laplace_diagonal", "laplace_kronecker", "mean_field")
"""Learn one text after another, with as many updates each."""


class Source(NamedTuple):
    """The location of a text: a Debian package and a file in it."""

    package: str
    file: str


SOURCES = {
    "policy": Source("debian-policy", "usr/share/doc/debian-policy/policy.txt.gz"),  # technical English
    "devil": Source("dict-devil", "usr/share/dictd/devil.dict.dz"),  # Bierce, The Devil's Dictionary
    "german": Source("fortunes-de", "usr/share/games/fortunes/de/zitate"),  # quotations
    "italian": Source("fortunes-it", "usr/share/games/fortunes/it/italia"),  # sayings and jokes
}
ORDERS = (tuple(SOURCES), tuple(reversed(SOURCES)))
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass
class Settings:
    """The settings of the run. Sizes follow from the machine, LoRA and learning rate from the quickstart."""

    cache: str = field(
        default="continual-output", metadata={"help": "Folder of texts, base model and posteriors, to continue from."}
    )
    characters: int = field(default=30_000, metadata={"help": "Characters of each text, from its middle."})
    updates: int = field(default=80, metadata={"help": "Updates of each episode; offline makes all of them at once."})
    batch_size: int = field(default=1, metadata={"help": "Windows of an update."})
    learning_rate: float = field(default=3e-3, metadata={"help": "Learning rate of Adam, for all methods."})
    prior_std: float = field(
        default=1.0, metadata={"help": "Std of the first prior. It is wide: MAP is ordinary fine-tuning."}
    )
    window: int | None = field(default=None, metadata={"help": "Tokens. Default: the model's context, 512."})
    stride: int = field(default=384, metadata={"help": "New tokens in a window."})
    lora_layers: list[int] = field(default_factory=lambda: [2], metadata={"help": "Blocks; the last, as in the paper."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "Seeds of LoRA and the batches."})
    strengths: list[float] = field(
        default_factory=lambda: [1.0, 10.0, 100.0, 1000.0], metadata={"help": "Values of lambda to choose from."}
    )
    std_learning_rates: list[float] = field(
        default_factory=lambda: [0.01, 0.03, 0.1], metadata={"help": "The same for mean_field, without lambda."}
    )


def fetch(source: Source, cache: Path) -> tuple[str, str]:
    """Return the whole text and the version of its package. apt and dpkg download and unpack it without root.

    Raises:
        RuntimeError: if there is no apt, or apt has no such package.
    """
    archives = sorted(cache.glob(f"{source.package}_*.deb"))
    if not archives:
        if missing := [program for program in ("apt-get", "dpkg-deb") if shutil.which(program) is None]:
            raise RuntimeError(
                f"the texts come from packages of Debian, and {' and '.join(missing)} cannot be found: run this on "
                f"Debian or Ubuntu, or put {source.package}_*.deb into {cache}"
            )
        cache.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["apt-get", "download", source.package], cwd=cache, capture_output=True, text=True)
        archives = sorted(cache.glob(f"{source.package}_*.deb"))
        if not archives:
            raise RuntimeError(
                f"apt-get download {source.package} failed: {done.stderr.strip()}. Is apt-get update done?"
            )
    archive = archives[-1]
    version = subprocess.run(["dpkg-deb", "-f", archive, "Version"], check=True, capture_output=True, text=True).stdout
    unpacked = cache / archive.stem
    subprocess.run(["dpkg-deb", "-x", archive, unpacked], check=True)
    content = (unpacked / source.file).read_bytes()
    if content.startswith(b"\x1f\x8b"):  # gzip or dictzip, which is gzip with an index
        content = gzip.decompress(content)
    return content.decode("utf-8"), version.strip()


def prepare(settings: Settings, cache: Path) -> dict[str, dict[str, Any]]:
    """Write NAME.txt for each text, and return a description of each."""
    about = {}
    for name, source in SOURCES.items():
        text, version = fetch(source, cache / "packages")
        start = max(0, len(text) - settings.characters) // 2
        text = text[start : start + settings.characters]
        (cache / f"{name}.txt").write_text(text, encoding="utf-8")
        digest = hashlib.sha256(text.encode()).hexdigest()
        about[name] = {**source._asdict(), "version": version, "characters": len(text), "sha256": digest}
    return about


def base(cache: Path) -> Path:
    """Return the quickstart's base model, trained from random weights on the docstrings of the standard library."""
    directory = cache / "base"
    if not (directory / "trained.json").exists():
        texts = corpora()["pretrain"]
        about = pretrain_base(texts, train_tokenizer(texts), directory)
        (directory / "trained.json").write_text(json.dumps(about))
    return directory


def learn(
    settings: Settings, episodes: Sequence[Path], methods: Sequence[str], output: Path, seed: int,
    *, updates: int | None = None, **fields: Any,
) -> Results:  # fmt: skip
    """Run ``run`` of the command with these settings. ``fields`` are fields of ContinualArguments."""
    return command.run(
        LoraArguments(
            str(Path(settings.cache) / "base"), lora_alpha=16, lora_targets=LINEAR, lora_layers=settings.lora_layers
        ),
        ContinualArguments(
            episodes=list(map(str, episodes)), methods=list(methods), window=settings.window, stride=settings.stride,
            prior_std=settings.prior_std, **fields,
        ),
        BayesianTrainingArguments(
            output_dir=str(output), learning_rate=settings.learning_rate, max_steps=updates or settings.updates,
            per_device_train_batch_size=settings.batch_size, per_device_eval_batch_size=16, seed=seed, use_cpu=True,
            save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        ),
    )  # fmt: skip


def knob(method: str, value: float) -> dict[str, Any]:
    """Return the fields that give a method its chosen value."""
    if method == "mean_field":
        return {"mean_field_args": {"std_learning_rate": value, "num_draws": 1}}
    return {"strength": value} if method.startswith("laplace") else {}


def choose(settings: Settings, first: Path, method: str, output: Path) -> dict[str, float]:
    """Return value -> loss, computed from the training part of the first episode only.

    This part is cut into two pseudo-episodes. The second is put into ROT13: two halves of one text cause no
    forgetting, and every lambda against forgetting would be too large. The loss is the mean over the held-out ends of
    both halves after the second one, with half of the updates for half of the text.
    """
    text = load_episode(str(first))[0]["text"][0]
    halves = [text[: len(text) // 2], codecs.encode(text[len(text) // 2 :], "rot13")]
    files = [output / f"half_{index}.txt" for index in range(2)]
    output.mkdir(parents=True, exist_ok=True)
    for file, half in zip(files, halves, strict=True):
        file.write_text(half, encoding="utf-8")
    values = settings.std_learning_rates if method == "mean_field" else settings.strengths
    losses = {}
    for value in values:
        folder, updates = output / f"{method}_{value:g}", max(1, settings.updates // 2)
        found = learn(settings, files, [method], folder, 0, updates=updates, **knob(method, value))
        losses[f"{value:g}"] = statistics.fmean(found[method][-1])
    return losses


def run(settings: Settings) -> dict[str, Any]:
    """Run all texts, choices, seeds and orders. An interrupted run continues in ``settings.cache``."""
    cache = Path(settings.cache)
    cache.mkdir(parents=True, exist_ok=True)
    about = prepare(settings, cache)
    trained = json.loads((base(cache) / "trained.json").read_text())
    files = {name: cache / f"{name}.txt" for name in SOURCES}
    choices = {
        order[0]: {m: choose(settings, files[order[0]], m, cache / "choice" / order[0]) for m in METHODS[1:]}
        for order in ORDERS
    }
    runs = []
    for seed in settings.seeds:
        # Both are independent of the order: one run for each seed.
        shared = learn(settings, list(files.values()), ["single", "offline"], cache / f"seed_{seed}" / "shared", seed)
        for order in ORDERS:
            places = [list(files).index(name) for name in order]
            losses = {name: [[rows[n][e] for e in places] for n in places] for name, rows in shared.items()}
            for method in METHODS:
                found = choices[order[0]].get(method)
                fields = {} if found is None else knob(method, float(min(found, key=found.__getitem__)))
                output = cache / f"seed_{seed}" / f"from_{order[0]}"
                losses |= learn(settings, [files[name] for name in order], [method], output, seed, **fields)
                print(f"seed {seed}, {' '.join(order)}: {method} {above(losses, method):.4f}", flush=True)
            runs.append({"seed": seed, "order": order, "losses": losses})
    kept = dataclasses.asdict(settings)
    del kept["cache"]
    return {"settings": kept, "texts": about, "base": trained, "choices": choices, "runs": runs}


def above(losses: Results, method: str) -> float:
    """Return the compared figure: the final loss minus the loss of single-episode training, mean over episodes."""
    return excess(losses, method)[-1]


def differences(runs: Sequence[dict[str, Any]], method: str) -> list[float]:
    """Return ``above`` minus its value for sequential fine-tuning, by seed and order. Below zero is better."""
    return [above(run["losses"], method) - above(run["losses"], "sequential") for run in runs]


def paired(runs: Sequence[dict[str, Any]], method: str) -> str:
    """Return the mean difference and its standard error."""
    values = differences(runs, method)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):+.4f} ± {error:.4f}"


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page: results, choices and texts."""
    runs, names = record["runs"], ["offline", *METHODS]
    rows = []
    for name in names:
        losses = [run["losses"] for run in runs]
        better = sum(value < 0 for value in differences(runs, name))
        compared = ["", ""] if name == "sequential" else [paired(runs, name), f"{better} of {len(runs)}"]
        last = [one[name][-1][-1] - one["single"][-1][-1] for one in losses]
        rows.append([
            name,
            report.spread([above(one, name) for one in losses]),
            "" if name == "offline" else report.spread([forgotten(one, name) for one in losses]),
            report.spread(last),
            *compared,
        ])  # fmt: skip
    columns = ["method", "above single", "forgotten", "last episode", "minus sequential, paired", "better"]
    starts = list(dict.fromkeys(run["order"][0] for run in runs))
    by_order = [
        [name, *(paired([run for run in runs if run["order"][0] == start], name) for start in starts)]
        for name in names if name != "sequential"
    ]  # fmt: skip
    choices = [
        [start, method, ", ".join(f"{value}: {loss:.4f}" for value, loss in found.items()), min(found, key=found.get)]
        for start, chosen in record["choices"].items()
        for method, found in chosen.items()
    ]
    texts = [
        [name, text["package"], text["version"], text["characters"], f"`{text['sha256'][:16]}`"]
        for name, text in record["texts"].items()
    ]
    return {
        "results": report.table(columns, rows),
        "orders": report.table(["method", *(f"{start} first" for start in starts)], by_order),
        "choices": report.table(["first episode", "method", "value: loss on it", "chosen"], choices),
        "texts": report.table(["text", "package", "version", "characters", "sha256 begins"], texts),
        "settings": ", ".join(f"{name} {value}" for name, value in record["settings"].items()),
    }


def figures(record: dict[str, Any], directory: Path) -> None:
    """Draw the paper's figures 5 and 6, one column for each order, with means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    orders = {}
    for run in record["runs"]:
        orders.setdefault(tuple(run["order"]), []).append(run["losses"])
    means = {order: mean(losses) for order, losses in orders.items()}
    height, width = len(next(iter(means))), len(means)
    figure, panels = pyplot.subplots(height, width, figsize=(4.5 * width, 1.9 * height), squeeze=False)
    for column, (order, losses) in zip(panels.T, means.items(), strict=True):
        draw_losses(column, losses, order)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), fontsize=8, frameon=False)
    figure.supylabel("test loss, nats per token", fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(directory / f"{NAME}_losses.png", dpi=130)
    pyplot.close(figure)

    figure, panels = pyplot.subplots(1, width, figsize=(4.5 * width, 3.8), sharey=True, squeeze=False)
    for panel, (order, losses) in zip(panels[0], means.items(), strict=True):
        draw_average(panel, losses)
        panel.set_title(f"order: {', '.join(order)}", fontsize=9)
    panels[0, 0].set_ylabel("test loss above single-episode\ntraining, nats per token")
    panels[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(directory / f"{NAME}.png", dpi=130)
    pyplot.close(figure)


def mean(results: Sequence[Results]) -> Results:
    """Return means over seeds, number by number."""
    return {name: numpy.mean([one[name] for one in results], axis=0).tolist() for name in results[0]}


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    (given,) = parse_arguments(Settings)
    report.keep(NAME, lambda: run(given))
