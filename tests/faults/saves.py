"""F1 and F2 through ``save_model``, with tokenizer and chat template: savers killed, overtaken or without disk space.

Each campaign also runs with the broken twin, which writes the tokenizer after the commit.

python -m tests.faults.saves DIRECTORY KILLS READS LIMITS SEED    -> one line of JSON
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.models.loading.posterior import load_tokenizer
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.sidecars import Sidecars
from hf_bayes.training.trainer import BayesianTrainer
from tests.faults.kills import fork
from tests.faults.posteriors import equal
from tests.runs import trainer
from tests.tiny_models import TEXTS, tiny_tokenizer

Save = Callable[[BayesianTrainer, Path], None]
CHAT = [{"role": "user", "content": "a cell"}]
WORDS = {"one": TEXTS, "other": tuple(text.upper() for text in TEXTS)}


def save_model(run: BayesianTrainer, directory: Path) -> None:
    run.save_model(str(directory))


def tokenizer_after_the_commit(run: BayesianTrainer, directory: Path) -> None:
    """Save the posterior in one step and the tokenizer in the next: the broken twin."""
    replace(run.posterior, sidecars=Sidecars()).save_pretrained(directory)
    run.processing_class.save_pretrained(str(directory))


def runs(base: Path) -> dict[str, BayesianTrainer]:
    """Return two finished runs whose tensors, tokenizers and templates all differ."""
    made = {}
    for seed, (name, texts) in enumerate(WORDS.items()):
        tokenizer = tiny_tokenizer(texts)
        tokenizer.chat_template = f"{name}: {{{{ messages[0]['content'] }}}}" + "." * 300 * (seed + 1)
        made[name] = trainer(base / name, MAPConfig(num_chains=2), processing_class=tokenizer, seed=seed, max_steps=2)
        made[name].train()
        made[name].save_model()
    return made


class Saved(NamedTuple):
    """A run after it is read from disk."""

    posterior: Posterior
    vocabulary: dict[str, int]


def found(directory: Path, expected: dict[str, Saved]) -> str:
    """Return the run whose posterior, tokenizer and template a reader finds together, or "broken" with the parts."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = Posterior.from_pretrained(directory)
            tokenizer = load_tokenizer(directory, posterior=posterior) if posterior.sidecars else beside(directory)
    except (ValueError, OSError) as error:
        return f"broken: {type(error).__name__}: {str(error)[:120]}"
    name = next((name for name, saved in expected.items() if equal(posterior, saved.posterior)), None)
    if name is None:
        return "broken: tensors of neither"
    words = tokenizer.apply_chat_template(CHAT, tokenize=False) if tokenizer.chat_template else "no template"
    if not words.startswith(f"{name}: "):
        return f"broken: tensors of {name}, template {words[:12]!r}"
    return name if tokenizer.get_vocab() == expected[name].vocabulary else f"broken: tensors of {name}, other tokens"


def beside(directory: Path) -> Any:
    """Return the tokenizer that a reader without a manifest finds."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:
        raise ValueError(f"no tokenizer: {error}") from error


def expected(made: dict[str, BayesianTrainer], directory: Path, save: Save) -> dict[str, Saved]:
    """Save each run, read it from disk, and return the results."""
    saved = {}
    for name, run in made.items():
        save(run, directory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved[name] = Saved(Posterior.from_pretrained(directory), run.processing_class.get_vocab())
        assert found(directory, saved) == name, found(directory, saved)
    return saved


def writer(made: dict[str, BayesianTrainer], directory: Path, save: Save) -> int:
    """Start a fork that saves the runs in turn, again and again."""

    def work() -> None:
        while True:
            for run in made.values():
                save(run, directory)

    return fork(work)


def stop(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def kill(made: dict[str, BayesianTrainer], directory: Path, save: Save, count: int, rng: random.Random) -> Counter[str]:
    """Return the result of a reader after each of ``count`` kills, at random times of about two saves."""
    saved = expected(made, directory, save)
    started = time.monotonic()
    save(made["other"], directory)
    seconds = time.monotonic() - started
    tally: Counter[str] = Counter()
    for _ in range(count):
        child = writer(made, directory, save)
        time.sleep(rng.uniform(0.0, 2.5 * seconds))
        stop(child)
        tally[found(directory, saved)] += 1
        save(made["other"], directory)
    return tally


def read(made: dict[str, BayesianTrainer], directory: Path, save: Save, count: int) -> Counter[str]:
    """Return the results of ``count`` readers while another process saves."""
    saved = expected(made, directory, save)
    child = writer(made, directory, save)
    try:
        return Counter(found(directory, saved) for _ in range(count))
    finally:
        stop(child)


def fill(made: dict[str, BayesianTrainer], directory: Path, save: Save, count: int) -> Counter[str]:
    """Return the results of a reader after saves with a limit on file sizes, and the errors of these saves."""
    saved = expected(made, directory, save)
    largest = max(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tally: Counter[str] = Counter()
    for number in range(count):
        save(made["one"], directory)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest * (number + 1) // (count + 1), hard))
        words = "saved"
        try:
            save(made["other"], directory)
        except Exception as error:
            named = str(directory) in str(error) or tempfile.gettempdir() in str(error)
            words = "refused" if named and getattr(error, "errno", None) == errno.EFBIG else f"broken: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        outcome = found(directory, saved)
        whole = outcome == ("other" if words == "saved" else "one")
        tally[words if whole else f"broken: {words}, then {outcome}"] += 1
    return tally


def main(base: str, kills: str, reads: str, limits: str, seed: str) -> None:
    os.fsync = lambda file: None  # fsync protects against power cuts, not kills
    torch.set_num_threads(1)  # forks of a process with worker threads may hang
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tempfile.tempdir = f"{base}/temporary"  # killed writers leave their files in this folder
    Path(tempfile.tempdir).mkdir()
    made = runs(Path(base))
    result: dict[str, Any] = {}
    for name, save in (("save_model", save_model), ("twin", tokenizer_after_the_commit)):
        place, rng = Path(base) / name, random.Random(int(seed))
        started = time.monotonic()
        result[name] = {
            "kills": kill(made, place / "killed", save, int(kills), rng),
            "reads": read(made, place / "read", save, int(reads)),
            "limits": fill(made, place / "limited", save, int(limits)),
            "seconds": round(time.monotonic() - started),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
