"""F9: the memory of a prediction, and the state of the disk after memory has run out.

python -m tests.faults.memory peak pieces|whole          -> one line of JSON
python -m tests.faults.memory starve DIRECTORY WHAT      -> one line of JSON
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.attaching import attach
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.language import causal_members
from hf_bayes.posteriors.posterior import Posterior
from tests import runs
from tests.faults.posteriors import draws, equal
from tests.tiny_models import tiny_llama, with_lora

MEMBERS, ROWS, LENGTH, VOCABULARY, WIDTH = 64, 16, 256, 1 << 15, 256
TERMS = 2  # labelled positions of a row: few, because the head is not measured and takes most of the time


def status(field: str) -> int:
    """Return the bytes in a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(field)


def extra(work: Callable[[], Any]) -> int:
    """Return the bytes by which ``work`` raises the peak of the resident memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory of the allocator would hide as many bytes
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    work()
    return status("VmHWM") - before


def peak(batch_in: str) -> dict[str, Any]:
    core = tiny_llama(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=1)
    core.config.max_position_embeddings = LENGTH
    model = attach(with_lora(core, r=8), num_members=MEMBERS).eval()
    if batch_in == "whole":  # the broken twin holds the hidden states of the whole batch
        causal_members.HIDDEN_BYTES = 1 << 40
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = torch.where(torch.arange(LENGTH) < LENGTH - TERMS, -100, ids)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    with torch.no_grad():
        model.evaluate_batch({name: value[:1, -8:] for name, value in batch.items()})  # objects of a first call
        found = extra(lambda: model.evaluate_batch(batch))
    return {
        "extra": found,
        "model": sum(parameter.nbytes for parameter in core.parameters()),
        "member": model.theta[0].nbytes,
        "hidden": MEMBERS * ROWS * LENGTH * WIDTH * 4,
    }


def starve(base: str, what: str) -> dict[str, int]:
    """Predict, train or save with increasing address space, and check the disk after each attempt."""
    root = Path(base)
    trainer = runs.trainer(root / "run", SGHMCConfig(num_chains=4))
    trainer.train()
    trainer.save_model()
    small, large = draws(2, seed=1), wide_draws()
    small.save_pretrained(root / "saved")
    written = Posterior.from_pretrained(root / "run")
    ids = torch.randint(3, 320, (32, 128))
    labels = torch.where(torch.arange(128) < 126, -100, ids)

    def predict() -> None:
        model = BayesianModelForCausalLM.from_pretrained(root / "run", base_model=tiny_llama())
        model.show(model.current.repeat(16, 1))
        with torch.no_grad():
            model.evaluate_batch({"input_ids": ids, "labels": labels})

    def train() -> Callable[[], None]:
        rows = runs.token_rows(64, length=128)
        return runs.trainer(root / "run", SGHMCConfig(num_chains=4), train=rows, per_device_train_batch_size=64).train

    def save() -> None:
        large.save_pretrained(root / "saved")

    ready = {"predict": lambda: predict, "train": train, "save": lambda: save}[what]
    found = {"starved": 0, "fed": 0, "lost": 0}
    for mebibytes in (0, 1, 2, 4, 8, 16, 1 << 14):
        found[confined(ready(), mebibytes << 20)] += 1
        saved = Posterior.from_pretrained(root / "saved")
        whole = equal(Posterior.from_pretrained(root / "run"), written)
        found["lost"] += not (whole and (equal(saved, small) or equal(saved, large)))
    return found


def wide_draws() -> Posterior:
    """Return draws of 16 MiB per member: more than the free memory that an allocator keeps."""
    few = draws(3, seed=2)
    config = type(few.config)(**{**vars(few.config), "parameters": [["lm_head.weight", [1 << 22]]]})
    theta = torch.randn(3, 1 << 22, generator=torch.Generator().manual_seed(2))
    return Posterior(type(few.approximation)(theta, torch.arange(3)), config, None)


def confined(work: Callable[[], None], room: int) -> str:
    """Return the outcome of ``work`` with ``room`` more bytes of address space than are in use."""
    gc.collect()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + room, hard))
    try:
        work()
    except Exception:  # MemoryError, torch's RuntimeError, the system's OSError, the interpreter's SystemError
        return "starved"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return "fed"


def main(what: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    print(json.dumps({"peak": peak, "starve": starve}[what](*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
