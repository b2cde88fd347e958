"""Fingerprints of what the package computes, to show that a change of structure changes no number.

python -m tests.equivalence record FILE      write sha256 of draws, posteriors, predictions and generated tokens
python -m tests.equivalence compare FILE     do it again and list what differs; exit status 1 if anything does

Only public names of ``hf_bayes`` are used, so the same file runs before and after modules move. Bits depend on the
processor and on torch: record and compare on one machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import default_data_collator

import hf_bayes
from hf_bayes import METHODS, BayesianTrainer, BayesianTrainingArguments, attach, fit_laplace, sample
from tests.tiny_models import batch, images, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit, with_lora

SEEDS = (0, 1)
CONFIGS: dict[str, dict[str, Any]] = {
    "sghmc": {"momentum": 0.8},
    "sgld": {},
    "baoab": {"momentum": 0.8, "scheme": "baoa"},
    "sgnht": {"momentum": 0.8, "thermostat_steps": 6.0},
    "sghmc_euler": {"momentum": 0.8},
    "map": {"momentum": 0.8},
    "ensemble": {},
    "mean_field": {"init_std": 0.05},
    "ivon": {"init_std": 0.05},
    "low_rank_vi": {"rank": 3},
    "full_rank_vi": {},
    "ekf": {"init_std": 0.5},
    "metropolis": {"target_acceptance": 0.3},
    "hmc": {"num_leapfrog": 4},
    "laplace": {"structure": "kronecker"},
    "penalty": {"num_leapfrog": 3, "proposal_batches": 2, "target_acceptance": 0.7},
    "agps": {"max_std": 0.8},
    "gps": {"max_std": 1.0},
    "sgd_mc": {"momentum": 0.5},
    "snapshot": {"momentum": 0.8, "schedule": None},
    "swa": {"momentum": 0.0, "optimizer": "sgd"},
    "swag": {"momentum": 0.0, "rank": 3, "optimizer": "sgd"},
    "mc_dropout": {"dropout": 0.3, "num_masks": 2},
}
"""Fields of every method's config."""
RATES = {
    "swa": 0.5,
    "swag": 0.5,
    "metropolis": 0.3,
    "map": 0.01,
    "ensemble": 0.01,
    "mean_field": 0.01,
    "ivon": 0.05,
    "low_rank_vi": 0.01,
    "full_rank_vi": 0.01,
    "laplace": 0.01,
}

MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "llama-lora": (lambda: with_lora(tiny_llama()), {}),
    "llama-lora-every-linear": (lambda: with_lora(tiny_llama(), target_modules="all-linear"), {}),
    "llama-last-layer": (tiny_llama, {"subspace": "last_layer"}),
    "llama-last-block": (tiny_llama, {"subspace": "last_block"}),
    "llama-pattern": (tiny_llama, {"subspace": "norm"}),
    "gpt2-lora": (lambda: with_lora(tiny_gpt2()), {}),
    "gpt2-last-layer": (tiny_gpt2, {"subspace": "last_layer"}),
    "bert-lora": (lambda: with_lora(tiny_bert()), {}),
    "bert-last-layer": (tiny_bert, {"subspace": "last_layer"}),
    "vit-last-block": (tiny_vit, {"subspace": "last_block"}),
}


def digest(*tensors: Tensor) -> str:
    """sha256 of the bytes of tensors, and of their shapes and dtypes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def files_of(directory: Path) -> str:
    """sha256 over the tensor files of a posterior."""
    found = hashlib.sha256()
    for file in sorted(directory.rglob("*.safetensors")):
        if "checkpoint" not in str(file):
            found.update(file.relative_to(directory).as_posix().encode() + file.read_bytes())
    return found.hexdigest()


def sampled() -> Iterator[tuple[str, str]]:
    """Draws of every method through ``sample``."""
    for name, fields in CONFIGS.items():
        for seed in SEEDS:
            theta = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
            data = {"batches": [None], "batches_per_step": 4} if name == "penalty" else {}
            try:
                method, rate = METHODS[name](**fields), RATES.get(name, 0.1)
                result = sample(
                    rough, theta, method, num_steps=24, learning_rate=rate, num_data=10, burn_in=8, seed=seed, **data
                )
            except (ValueError, AssertionError) as error:
                yield f"sample/{name}/{seed}", f"refused: {type(error).__name__}"
                continue
            yield f"sample/{name}/{seed}", digest(result.draws, result.approximation.mean)


def rough(theta: Tensor, batch: object) -> Tensor:
    """An energy with coupled coordinates and several minima."""
    return 10 * (0.5 * theta.square() + (2 * theta).cos() + 0.1 * theta * theta.roll(1, 1)).sum(1)


def rows(count: int = 8) -> list[dict[str, list[int]]]:
    """Rows of tokens, each its own label."""
    ids = torch.randint(3, 320, (count, 8), generator=torch.Generator().manual_seed(2)).tolist()
    return [{"input_ids": row, "attention_mask": [1] * 8, "labels": row} for row in ids]


def trained(directory: Path) -> Iterator[tuple[str, str]]:
    """Posteriors of every method through the trainer."""
    for name, fields in CONFIGS.items():
        for seed in SEEDS:
            place = directory / f"{name}-{seed}"
            chains = {} if name == "laplace" else {"draws_per_chain": 2} if name not in ONE_DRAW else {}
            method = METHODS[name](num_chains=2, prior_std=0.1, **chains, **fields)
            steps = 4 if name == "ekf" else 8  # a filter reads the data once
            train(place, method, seed=seed, accumulation=4 if name == "penalty" else 1, num_steps=steps)
            yield f"trainer/{name}/{seed}", files_of(place)


ONE_DRAW = {
    "map",
    "ensemble",
    "mean_field",
    "ekf",
    "ivon",
    "low_rank_vi",
    "full_rank_vi",
    "swa",
    "swag",
    "mc_dropout",
    "snapshot",
}
"""Methods whose chains end in one approximation."""


def train(place: Path, method: Any, *, seed: int, accumulation: int, num_steps: int) -> None:
    """A short run on a tiny Llama with LoRA, saved in ``place``."""
    args = BayesianTrainingArguments(
        str(place), learning_rate=1e-2, max_steps=num_steps, per_device_train_batch_size=2, seed=seed, report_to="none",
        gradient_accumulation_steps=accumulation, save_strategy="no", disable_tqdm=True, use_cpu=True,
        logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = BayesianTrainer(
        with_lora(tiny_llama(), lora_dropout=0.1),
        method,
        args=args,
        train_dataset=Dataset.from_list(rows()),
        data_collator=default_data_collator,
    )
    trainer.train()
    trainer.save_model()


def predicted() -> Iterator[tuple[str, str]]:
    """Logits, uncertainties and generated tokens of three members of ten models and subspaces."""
    for name, (make, options) in MODELS.items():
        with torch.no_grad(), attach(make(), num_members=3, **options) as model:
            generator = torch.Generator().manual_seed(3)
            model.theta.data += 0.1 * torch.randn(model.theta.shape, generator=generator)
            inputs = images() if name.startswith("vit") else batch(padding="left" if "bert" not in name else "right")
            output = model(**inputs)
            yield f"predict/{name}", digest(output.logits, output.total, output.aleatoric, output.epistemic)
            if name.startswith(("llama", "gpt2")):
                text = model.generate(**inputs, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
                yield f"generate/{name}", digest(text.sequences, text.total, text.epistemic)
                beams = model.generate(**inputs, max_new_tokens=4, num_beams=2, do_sample=False)
                yield f"beams/{name}", digest(beams)
                score = model.score(**inputs)
                yield f"score/{name}", digest(*(v for v in vars_of(score) if isinstance(v, Tensor)))


def vars_of(record: Any) -> list[Any]:
    """The values of a mapping, a named tuple or a data class, in their order."""
    if isinstance(record, dict):
        return list(record.values())
    return list(record) if isinstance(record, tuple) else list(vars(record).values())


def approximated(directory: Path) -> Iterator[tuple[str, str]]:
    """Laplace factors of estimators and structures."""
    for structure in ("diagonal", "kronecker", "kronecker_corrected", "low_rank", "full"):
        for estimator in ("ggn", "ef_sequence", "ef_token"):
            method = METHODS["laplace"](structure=structure, estimator=estimator, prior_std=0.1)
            subspace = {"target_modules": ["v_proj"], "layers_to_transform": [1]}
            place = directory / f"{structure}-{estimator}"
            fit_laplace(with_lora(tiny_llama(), **subspace), rows(), method).save_pretrained(place)
            yield f"laplace/{structure}/{estimator}", files_of(place)


def launched(directory: Path) -> Iterator[tuple[str, str]]:
    """Posteriors of several processes."""
    for processes in (2, 4):
        place = directory / f"processes-{processes}"
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(
            [sys.executable, *command, "-m", "tests.equivalence", "launched", str(place)],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{processes} processes failed:\n{done.stderr}")
        yield f"processes/{processes}", files_of(place)


def everything() -> dict[str, str]:
    """All fingerprints, by name."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for part in (sampled(), predicted(), trained(directory), approximated(directory), launched(directory)):
            found |= dict(part)
    return found


def main(command: str, file: str) -> int:
    if command == "launched":
        logging.disable(logging.WARNING)
        train(Path(file), METHODS["sghmc"](num_chains=2, prior_std=0.1), seed=0, accumulation=1, num_steps=6)
        hf_bayes.end_process_group()
        return 0
    found = everything()
    if command == "record":
        machine = {"torch": torch.__version__, "hf_bayes": hf_bayes.__version__}
        Path(file).write_text(json.dumps({"machine": machine, "fingerprints": found}, indent=1) + "\n")
        print(f"{len(found)} fingerprints")
        return 0
    recorded = json.loads(Path(file).read_text())["fingerprints"]
    names = sorted(name for name in recorded.keys() | found.keys() if recorded.get(name) != found.get(name))
    print(f"{len(recorded)} recorded, {len(found)} found, {len(names)} differ", *names, sep="\n")
    return bool(names)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
