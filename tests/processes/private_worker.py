"""The work of one process of a launch with rows of its own: ``private_worker.py OUT``, run by torchrun."""

from __future__ import annotations

import json
import pickle
import sys
import unittest.mock
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_bayes import PenaltyConfig
from hf_bayes.objectives.private_rows import PrivateRows
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs
from tests.training.test_trainer_law import MeanConfig, MeanForSequenceClassification, Numbers

SIZES = {2: (45, 15), 4: (24, 14, 12, 10)}
"""Rows of each process, of the same 60."""
CHAINS, BATCH, BATCHES, UPDATES, BURN_IN = 256, 3, 8, 80, 30
STEP = 0.12
"""The step, about the standard deviation of the posterior, 1 / sqrt(61)."""
_MOVES = ("all_reduce", "all_gather", "broadcast", "all_gather_object", "broadcast_object_list", "gather", "scatter",
          "all_gather_into_tensor", "gather_object", "reduce", "reduce_scatter", "send", "isend")  # fmt: skip


def outcomes(copies: int = 1) -> Tensor:
    """[60 copies, 1]: a slope over the rows, so that every process has a mean of its own, and a spread."""
    noise = 0.9 * torch.randn(60 * copies, 1, generator=torch.Generator().manual_seed(3))
    return noise + torch.linspace(-1, 1, 60).repeat_interleave(copies)[:, None].round()


class Sent:
    """Bytes handed to torch.distributed by this process."""

    def __init__(self) -> None:
        self.bytes = 0
        for name in _MOVES:
            setattr(dist, name, self._counted(getattr(dist, name), place=1 if name.startswith("all_gather") else 0))

    def _counted(self, move: Any, *, place: int) -> Any:
        @wraps(move)
        def counted(*args: Any, **kwargs: Any) -> Any:
            given = args[place] if len(args) > place else next(iter(kwargs.values()))
            self.bytes += given.nbytes if isinstance(given, Tensor) else len(pickle.dumps(given))
            return move(*args, **kwargs)

        return counted


class Worker:
    def __init__(self, out: Path) -> None:
        self.out, self.rank = out, dist.get_rank()
        self.sizes = SIZES[dist.get_world_size()]
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, Any] = {}

    def trainer(
        self,
        name: str,
        *,
        sizes: tuple[int, ...] | None = None,
        copies: int = 1,
        method: Any = None,
        shift: float = 0.0,
        **changes: Any,
    ) -> BayesianTrainer:
        sizes = sizes or self.sizes
        first, count = copies * sum(sizes[: self.rank]), copies * sizes[self.rank]
        y = outcomes(copies)[first : first + count] + shift  # nothing else of the rows is known here
        model = MeanForSequenceClassification(MeanConfig(problem_type="regression", num_labels=1))
        nn.init.zeros_(model.linear.weight)
        settings: dict[str, Any] = {
            "max_steps": UPDATES, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": BATCHES,
            "logging_steps": 10_000, "members_per_pass": CHAINS, "probe_steps": 0,
        }  # fmt: skip
        return runs.trainer(
            self.out / name,
            method or config(),
            model=model.double(),
            subspace="all",
            train=Numbers(count),
            collator=lambda rows: {"x": torch.ones(len(rows), 1).double(), "labels": y[rows].double()},
            noise_std=1.0,
            private_rows=True,
            **{**settings, **changes},
        )

    def law(self, name: str) -> None:
        trainer = self.trainer(name)
        trainer.train()
        self.tensors[f"{name}/draws"] = torch.stack(trainer.run.draws, 1)[..., 0].contiguous()
        self.numbers[f"{name}/beyond"] = trainer.posterior.config.diagnostics.get("beyond_series")

    def twins(self) -> None:
        with unittest.mock.patch.object(PrivateRows, "weight", 1.0):
            self.law("alike")
        part = PrivateRows.contribution

        def certain(stratum: PrivateRows, log_lik: Tensor) -> Tensor:
            largest = stratum.sizes[stratum.rank] == max(stratum.sizes)
            return part(stratum, log_lik.mean(1, keepdim=True).expand_as(log_lik) if largest else log_lik)

        with unittest.mock.patch.object(PrivateRows, "contribution", certain):
            self.law("certain")

    def traffic(self) -> None:
        """Bytes of a run of 2 and of 6 updates, on rows and on twenty times as many."""
        sent = Sent()
        for name, copies, updates in (("few", 1, 2), ("few", 1, 6), ("many", 20, 2), ("many", 20, 6)):
            sent.bytes = 0
            self.trainer(name, copies=copies, max_steps=updates, method=config(draws_per_chain=1, burn_in=0)).train()
            self.numbers[f"sent/{name}/{updates}"] = sent.bytes

    def resume(self) -> None:
        method = config(num_chains=3, num_leapfrog=1, draws_per_chain=2, burn_in=0.5)
        settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "probe_steps": 2, "method": method}
        whole, resumed = self.trainer("whole", **settings), self.trainer("resumed", **settings)
        whole.train()
        whole.save_model()
        checkpoint = str(self.out / "whole" / "checkpoint-4")
        resumed.train(resume_from_checkpoint=checkpoint)
        states = [t.run.state._asdict() for t in (whole, resumed)]
        same = [torch.equal(value, states[1][field]) for field, value in states[0].items()]
        same.append(runs.equal(whole.posterior.approximation, resumed.posterior.approximation))
        same += map(torch.equal, whole.monitor.probes, resumed.monitor.probes)
        self.numbers["resume/same"] = all(same)
        self.tensors["whole/theta"] = whole.run.state.theta
        self.numbers["whole/logits"] = [look.numel() for look in whole.monitor.probe_logits]
        self.tensors["whole/probes"] = torch.stack(whole.monitor.probes)
        self.refused("sizes", lambda: self.trainer("resumed", sizes=self.sizes[::-1], **settings).train(checkpoint))
        last = 0.1 * (self.rank == dist.get_world_size() - 1)
        self.refused("rows", lambda: self.trainer("resumed", shift=last, **settings).train(checkpoint))

    def refused(self, name: str, action: Any) -> None:
        try:
            action()
        except ValueError as error:
            self.numbers[f"refused/{name}"] = str(error)

    def refuse(self) -> None:
        self.refused("settings", lambda: self.trainer("other", learning_rate=0.1 * (1 + self.rank)))
        self.refused("evaluation", lambda: self.trainer("other", eval_dataset=Numbers(3 + self.rank)))
        small = (*self.sizes[:-1], BATCH - 1)
        self.refused("small", lambda: self.trainer("other", sizes=small))
        disjoint = config(replacement=False)
        self.refused("disjoint", lambda: self.trainer("other", method=disjoint))


def config(**changes: Any) -> PenaltyConfig:
    fields: dict[str, Any] = {
        "num_chains": CHAINS, "draws_per_chain": UPDATES - BURN_IN, "burn_in": BURN_IN, "prior_std": 1.0,
        "init_jitter": STEP, "step_size": STEP, "target_acceptance": None,
    }  # fmt: skip
    return PenaltyConfig(**{**fields, **changes})


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    worker = Worker(Path(sys.argv[1]))
    worker.law("right")
    if dist.get_world_size() == 2:
        worker.twins()
    worker.resume()
    worker.refuse()
    worker.traffic()
    save_file(worker.tensors, worker.out / f"rank_{worker.rank}.safetensors")
    (worker.out / f"rank_{worker.rank}.json").write_text(json.dumps(worker.numbers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
