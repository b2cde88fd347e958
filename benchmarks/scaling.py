"""Chains over 1, 2 and 4 processes: seconds per update and what crosses between them.

``python -m benchmarks.scaling`` writes benchmarks/results/scaling.json and the table of docs/multi_gpu.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import wraps
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback, default_data_collator

from benchmarks.harness import machine
from benchmarks.models import Subject
from benchmarks.table import RESULTS, ROOT, replaced

LAYOUTS = ((4, 1), (4, 2), (4, 4), (2, 1), (2, 2), (2, 4))
"""Chains, processes."""
ROWS, LENGTH = 4, 128
"""R, rows of an update and chain, whatever the layout; tokens of a row."""
WARM, UPDATES = 2, 8
"""Updates that are not timed, and that are."""
DOCUMENT = ROOT / "docs" / "multi_gpu.md"
_MOVES = ("all_reduce", "all_gather", "broadcast", "all_gather_object")


class Watch(TrainerCallback):
    """Seconds from the end of an update to the end of the next, and bytes handed to torch.distributed meanwhile."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.bytes: list[int] = []
        self._sent = 0
        for name in _MOVES:
            setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, move: Any) -> Any:
        @wraps(move)
        def counted(*args: Any, **kwargs: Any) -> Any:
            given = args[1] if move.__name__.startswith("all_gather") else args[0]
            self._sent += given.nbytes if isinstance(given, Tensor) else len(json.dumps(given, default=str))
            return move(*args, **kwargs)

        return counted

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())
        self.bytes.append(self._sent)
        self._sent = 0


def work(chains: int) -> None:
    """One process of a launch; the first one prints what it saw."""
    from hf_bayes import BayesianTrainer, BayesianTrainingArguments, SGHMCConfig

    torch.set_num_threads(1)
    per_chain = max(1, int(os.environ["WORLD_SIZE"]) // chains)
    model = Subject("30M", "cpu", "float32").trainable("all layers")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (256, LENGTH), generator=generator).tolist()
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        args = BayesianTrainingArguments(
            folder, learning_rate=1e-3, max_steps=WARM + UPDATES, per_device_train_batch_size=ROWS // per_chain,
            save_strategy="no", report_to="none", logging_steps=UPDATES, disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = BayesianTrainer(
            model,
            SGHMCConfig(num_chains=chains, prior_std=0.05),
            args,
            train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
            data_collator=default_data_collator,
            callbacks=[watch],
        )
        trainer.train()
    if trainer.is_world_process_zero():
        seconds = [after - before for before, after in zip(watch.ends, watch.ends[1:], strict=False)][WARM - 1 :]
        # the update that is logged also gathers its numbers: the others are what a run is made of
        found = {"seconds": seconds, "bytes": min(watch.bytes[WARM:]), "d": trainer.bayesian.layout.dim}
        print("RESULT" + json.dumps(found))


def launch(chains: int, processes: int) -> dict[str, Any]:
    """One layout: what its first process saw."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "-m", "benchmarks.scaling", str(chains)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{processes} processes with {chains} chains failed:\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.rsplit("RESULT", 1)[1].splitlines()[0])
    return {"chains": chains, "processes": processes, **found}


def render(record: dict[str, Any]) -> str:
    """The table, each row beside one process with the same chains."""
    about = record["machine"]
    lines = [
        f"LoRA of rank 8 on all layers of a Llama of 30M parameters (d = {record['runs'][0]['d']:,}), R = {ROWS} rows "
        f"of {LENGTH} tokens, float32, gloo, one thread a process, {about['cores']} cores: {about['processor']}, torch "
        f"{about['torch']}. Mean of {UPDATES} updates; bytes are what a process hands to torch.distributed.",
        "",
        "| chains | processes | layout (chains x data) | s per update | speed-up | bytes per update and process |",
        "|---|---|---|---|---|---|",
    ]
    alone = {run["chains"]: fmean(run["seconds"]) for run in record["runs"] if run["processes"] == 1}
    for run in record["runs"]:
        chains, processes, seconds = run["chains"], run["processes"], fmean(run["seconds"])
        parts = min(chains, processes)
        lines.append(
            f"| {chains} | {processes} | {parts} x {processes // parts} | {seconds:.2f} "
            f"| {alone[chains] / seconds:.2f} | {run['bytes']:,} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Launch every layout, keep and show what was found."""
    runs = [launch(*layout) for layout in LAYOUTS]
    record = {"machine": {**machine("cpu"), "cores": os.cpu_count(), "threads": 1}, "runs": runs}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "scaling.json").write_text(json.dumps(record, indent=1) + "\n")
    DOCUMENT.write_text(replaced(DOCUMENT.read_text(), "scaling", render(record)))
    print(render(record))


if __name__ == "__main__":
    work(int(sys.argv[1])) if len(sys.argv) > 1 else main()
