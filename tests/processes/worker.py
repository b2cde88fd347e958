"""The work of one process of a launch: the same runs whatever the layout, their results written for comparison.

Run by torchrun: ``worker.py OUT CHECKPOINTS``; the second is where an earlier launch left its own (or "none").
"""

from __future__ import annotations

import copy
import json
import os
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import IterableDataset

from hf_bayes import (
    BayesianModelForCausalLM,
    HMCConfig,
    LaplaceConfig,
    MeanFieldConfig,
    PenaltyConfig,
    SGHMCConfig,
    SWAGConfig,
)
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.objectives import range_test
from hf_bayes.objectives.heldout import HeldOutRows
from hf_bayes.objectives.range_test import trial_around
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs
from tests.processes.curvature_passes import curvature_passes
from tests.processes.watching import FirstGradient, Writes, counting
from tests.tiny_models import batch, tiny_bert, tiny_gpt2, tiny_tokenizer, with_lora

CHAINS = 4


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from runs.token_rows(30)


def deaf(rows: HeldOutRows, theta: Tensor, part: str, *, call: Any = HeldOutRows.of_mixture, **options: Any) -> Any:
    """Evaluate held-out rows with the sum over processes left out: each process returns the sum over its own rows."""
    rows.mesh = copy.copy(rows.mesh)
    rows.mesh.sum_over_data = lambda tensor: tensor
    return call(rows, theta, part, **options)


class Worker:
    def __init__(self, out: Path, earlier: Path | None) -> None:
        self.out, self.earlier = out, earlier
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, Any] = {}
        self.writes = Writes(out)

    def trainer(self, name: str, method: Any, *, data_size: int = 1, **changes: Any) -> BayesianTrainer:
        """``per_device_train_batch_size`` is that of one process per chain; others get their part of it."""
        dtype = changes.pop("dtype", torch.float64)
        rows = changes.pop("per_device_train_batch_size", 2)
        dropout = changes.pop("dropout", 0.0)
        # an adapter of its own in every process, as a script has it that sets no seed: the first one's counts
        seed = int(os.environ["RANK"])
        model = with_lora(tiny_gpt2(dtype=dtype, resid_pdrop=dropout, attn_pdrop=dropout), seed=seed)
        changes.setdefault("train", runs.token_rows(18))
        return runs.trainer(
            self.out / name, method, model=model, per_device_train_batch_size=rows // data_size, **changes
        )

    def keep(self, name: str, trainer: BayesianTrainer) -> None:
        """theta of every chain here, also of replicas; the logs; the saved posterior."""
        state = trainer.run.state
        for field, value in state._asdict().items():
            for chain, row in zip(trainer.run.chains, value, strict=True):
                self.tensors[f"{name}/{field}/{chain}"] = row.cpu().clone()
        self.numbers[f"{name}/logs"] = trainer.state.log_history
        trainer.save_model()
        self.numbers[f"{name}/metrics"] = trainer.posterior.config.metrics
        self.numbers[f"{name}/diagnostics"] = trainer.posterior.config.diagnostics

    def train(self) -> BayesianTrainer:
        """Twenty updates of four chains in float64, with everything that comes after."""
        method = SGHMCConfig(num_chains=CHAINS, draws_per_chain=4, prior_std=0.5)
        evaluation = runs.token_rows([8, 5, 7, 8, 3, 8, 6], seed=5)
        trainer = self.trainer(
            "train",
            method,
            max_steps=20,
            eval_dataset=evaluation,
            collator=runs.padding_collator(),
            processing_class=tiny_tokenizer(),
            eval_strategy="steps",
            eval_steps=10,
            probe_steps=2,
        )
        self.numbers["before/metrics"] = trainer.evaluate()
        trainer.train()
        self.keep("train", trainer)
        with counting() as self.numbers["moved/evaluate"]:
            trainer.evaluate()
        with counting() as self.numbers["moved/predict"]:
            prediction = trainer.predict(trainer.eval_dataset)
        self.tensors["predictions"] = torch.as_tensor(prediction.predictions)
        self.numbers["predict/metrics"] = prediction.metrics
        return trainer

    def first_gradient(self, chains: int) -> None:
        method, size = SGHMCConfig(num_chains=chains), max(1, dist.get_world_size() // chains)
        trainer = self.trainer(f"single{chains}", method, data_size=size, dtype=torch.float32, max_steps=1)
        FirstGradient.value = None
        trainer.train()
        for chain, row in zip(trainer.run.chains, FirstGradient.value, strict=True):
            self.tensors[f"gradient{chains}/{chain}"] = row.contiguous()

    def resume(self, chains: int) -> None:
        """Run whole and resumed on this layout, with dropout; and resume from another layout's checkpoint."""
        settings = {
            "max_steps": 8, "save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2,
            "data_size": max(1, dist.get_world_size() // chains),
        }  # fmt: skip
        method = SGHMCConfig(num_chains=chains, draws_per_chain=2)
        whole = self.trainer(f"whole{chains}", method, dropout=0.1, **settings)
        whole.train()
        resumed = self.trainer(f"resumed{chains}", method, dropout=0.1, **settings)
        resumed.train(resume_from_checkpoint=str(self.out / f"whole{chains}" / "checkpoint-4"))
        states = [t.run.state._asdict() for t in (whole, resumed)]
        same = [torch.equal(value, states[1][name]) for name, value in states[0].items()]
        same.append(runs.equal(whole.posterior.approximation, resumed.posterior.approximation))
        self.numbers[f"resume{chains}/same"] = all(same)
        self.numbers[f"resume{chains}/difference"] = max(
            float((value - states[1][name]).abs().max()) for name, value in states[0].items()
        )
        newest = self.trainer(f"whole{chains}", method, dropout=0.1, **settings)
        newest.train(resume_from_checkpoint=True)
        self.numbers[f"resume{chains}/newest"] = newest.state.global_step
        moved = self.trainer(f"moved{chains}", method, **settings)
        earlier = None if self.earlier is None else str(self.earlier / f"moved{chains}" / "checkpoint-4")
        moved.train(resume_from_checkpoint=earlier)
        self.keep(f"moved{chains}", moved)

    def own_settings(self, chains: int) -> None:
        """Run a sampler without a learning rate: a trial of rates, AdamW, a curvature pass, its own step size.

        The second run is resumed after that pass from another layout's checkpoint.
        """
        settings = {
            "learning_rate": None, "max_steps": 28, "save_strategy": "steps", "save_steps": 20,
            "data_size": max(1, dist.get_world_size() // chains),
        }  # fmt: skip
        method = SGHMCConfig(num_chains=chains, draws_per_chain=2, prior_std=0.5)
        whole = self.trainer(f"own{chains}", method, **settings)
        moved = self.trainer(f"own_moved{chains}", method, **settings)
        earlier = None if self.earlier is None else str(self.earlier / f"own_moved{chains}" / "checkpoint-20")
        with unittest.mock.patch.object(range_test, "plan_trial", return_value=trial_around(0.134, 4)):
            whole.train()
            moved.train(resume_from_checkpoint=earlier)
        self.keep(f"own{chains}", whole)
        self.keep(f"own_moved{chains}", moved)
        self.numbers[f"trial{chains}"] = list(whole.active.settings.trial.losses.values())

    def shared_chains(self) -> None:
        """Two chains: on four processes, two for each."""
        size = max(1, dist.get_world_size() // 2)
        # only four processes have two micro-batches to measure noise by, and what is reported is compared
        sghmc = SGHMCConfig(num_chains=2, draws_per_chain=2, measure_gradient_noise=False)
        for name, method, changes in (
            ("data", sghmc, {"eval_dataset": runs.token_rows(5, seed=5)}),
            ("hmc", HMCConfig(num_chains=2), {"max_steps": 3, "train": runs.token_rows(9)}),
            (
                "penalty",  # as many batches, other processes
                PenaltyConfig(num_chains=2, num_leapfrog=1, step_size=1e-3, target_acceptance=None),
                {"per_device_train_batch_size": 4 * size, "gradient_accumulation_steps": 4 // size},
            ),
            (
                "stream",
                SGHMCConfig(num_chains=2),
                {"train": Stream(), "minibatch": "shared", "num_data": 500.0, "max_steps": 9},
            ),
        ):
            changes = {"max_steps": 20, "per_device_train_batch_size": 4, **changes}
            trainer = self.trainer(name, method, data_size=size, **changes)
            trainer.train()
            self.keep(name, trainer)

    def gaussian(self) -> None:
        trainer = self.trainer("gaussian", MeanFieldConfig(num_chains=CHAINS), eval_dataset=runs.token_rows(3, seed=5))
        trainer.train()
        self.keep("gaussian", trainer)

    def laplace(self) -> None:
        """Two chains, as in ``shared_chains``."""
        method = LaplaceConfig(num_chains=2, structure="kronecker", prior_std=0.5, init_jitter=0.1)
        size = max(1, dist.get_world_size() // 2)
        trainer = self.trainer("laplace", method, data_size=size)
        trainer.train()
        self.keep("laplace", trainer)

    def fitted(self) -> None:
        """A prior by held-out rows, and learnt noise: of two chains, which are gathered, and of one, which shares rows.

        And, for the twin, held-out rows without a word between processes.
        """
        heldout = runs.token_rows(5, seed=6)
        for chains, scope in ((2, "tensor"), (1, "model")):
            size = max(1, dist.get_world_size() // chains)
            method = LaplaceConfig(
                num_chains=chains,
                structure="kronecker",
                fit_prior="heldout",
                prior_scope=scope,
                prior_std=1.0,
                init_jitter=0.1,
            )
            for name, call in (("heldout", HeldOutRows.of_mixture), ("deaf_heldout", deaf)):
                if name == "heldout" or chains == 1:
                    with unittest.mock.patch.object(HeldOutRows, "of_mixture", call):
                        trainer = self.trainer(
                            f"{name}{chains}", method, data_size=size, per_device_train_batch_size=4,
                            eval_dataset=heldout,
                        )  # fmt: skip
                        trainer.train()
                    self.numbers[f"{name}{chains}"] = trainer.posterior.config.diagnostics["laplace"]
            evidence = LaplaceConfig(
                num_chains=chains, structure="full", num_samples=None, fit_noise=True, init_jitter=0.1
            )
            learners = (("noise", evidence, 2.0), ("learnt", MeanFieldConfig(num_chains=chains), None))
            for name, learner, given in learners:
                trainer = runs.trainer(
                    self.out / f"{name}{chains}",
                    learner,
                    model=tiny_bert(dtype=torch.float64, num_labels=1, hidden_size=4),
                    train=numbered(12),
                    eval_dataset=None if given else numbered(60),
                    subspace="last_layer",
                    noise_std=given,
                    per_device_train_batch_size=4 // size,
                )
                trainer.train()
                config = trainer.posterior.config
                self.numbers[f"{name}{chains}"] = config.head["noise_std"]
                if given is None:
                    self.numbers[f"run_{name}{chains}"] = config.diagnostics["noise_std_of_run"]

    def calibrated(self) -> None:
        """The temperature of a mixture: of chains of their own, of chains that processes share, and of a Gaussian."""
        methods = {
            "four": EnsembleConfig(num_chains=4, prior_std=1.0, init_jitter=0.1),
            "two": EnsembleConfig(num_chains=2, prior_std=1.0, init_jitter=0.1),
            "gaussian": SWAGConfig(num_chains=4, prior_std=1.0, init_jitter=0.1, rank=2),
        }
        for name, method in methods.items():
            trainer = self.trainer(
                f"calibrated_{name}", method, data_size=max(1, dist.get_world_size() // method.num_chains),
                learning_rate=0.1, eval_dataset=runs.token_rows(45, seed=5), max_steps=12,
            )  # fmt: skip
            trainer.train()
            self.numbers[f"calibrated_{name}"] = trainer.posterior.config.calibration
            self.numbers[f"calibrated_{name}/shown"] = trainer.bayesian.mixture_temperature

    def generate(self) -> None:
        """Members of one model spread over the processes."""
        base = tiny_gpt2(dtype=torch.float64)
        with torch.no_grad():
            model = BayesianModelForCausalLM.from_pretrained(self.out / "train", base_model=base).spread_members()
            for name, settings in (("greedy", {}), ("sampled", {"do_sample": True}), ("beam", {"num_beams": 3})):
                torch.manual_seed(7 if dist.get_rank() == 0 else 8)  # which one script seeds, another does not
                with counting() as self.numbers[f"moved/{name}"]:
                    found = model.generate(
                        **batch(3, 6, padding="left"), max_new_tokens=6, return_dict_in_generate=True, **settings
                    )
                for field in ("sequences", "total", "epistemic", "sequence_logprob"):
                    self.tensors[f"{name}/{field}"] = found[field].contiguous()

    def refuse(self) -> None:
        """Try to train where each process has a base model of its own."""
        model = with_lora(tiny_gpt2(seed=int(os.environ["RANK"])))
        try:
            runs.trainer(self.out / "refused", SGHMCConfig(num_chains=CHAINS), model=model)
        except ValueError as error:
            self.numbers["refused"] = str(error)
        uneven = {"even_batches": False}
        try:
            self.trainer("uneven", SGHMCConfig(num_chains=CHAINS), accelerator_config=uneven)
        except ValueError as error:
            self.numbers["refused/uneven"] = str(error)

    def refuse_rows(self) -> None:
        """Try to train where each process has rows of its own by mistake: shards, and a shuffle without a seed."""
        rank, world = dist.get_rank(), dist.get_world_size()
        rows, other = runs.token_rows(24), runs.token_rows(24, seed=1)
        for name, train in (
            ("same", rows),
            ("shard", rows if rank == 0 else rows[rank::world]),
            ("terms", runs.token_rows([8] * 23 + [8 + rank])),
            ("shuffle", rows[-rank:] + rows[:-rank]),
            ("last", rows[:-1] + (rows if rank == 0 else other)[-1:]),
        ):
            try:
                self.trainer(name, SGHMCConfig(num_chains=CHAINS), train=train, collator=runs.padding_collator())
            except ValueError as error:
                self.numbers[f"refused/{name}"] = str(error)

    def write(self) -> None:
        rank = dist.get_rank()
        self.numbers["writes"] = sorted(self.writes.names)
        save_file(self.tensors, self.out / f"rank_{rank}.safetensors")
        (self.out / f"rank_{rank}.json").write_text(json.dumps(self.numbers, default=float))


def numbered(count: int) -> list[dict[str, Any]]:
    """Return rows with a number, which its tokens do not tell."""
    labels = torch.randn(count, generator=torch.Generator().manual_seed(0)).tolist()
    return [{**row, "label": label} for row, label in zip(runs.label_rows(count), labels, strict=True)]


def main() -> None:
    torch.set_num_threads(1)
    FirstGradient.watch()
    worker = Worker(Path(sys.argv[1]), None if sys.argv[2] == "none" else Path(sys.argv[2]))
    worker.train()
    for chains in (CHAINS, 2):
        worker.first_gradient(chains)
        worker.resume(chains)
        worker.own_settings(chains)
    worker.shared_chains()
    worker.gaussian()
    worker.laplace()
    worker.fitted()
    worker.calibrated()
    worker.tensors |= curvature_passes()
    worker.generate()
    worker.refuse()
    worker.refuse_rows()
    worker.write()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
