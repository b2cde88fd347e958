"""The work of one process of a launch: the same runs whatever the layout, their results written for comparison.

Run by torchrun: ``worker.py OUT CHECKPOINTS``; the second is where an earlier launch left its own (or "none").
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
import unittest.mock
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import default_data_collator

from hf_bayes import (
    BayesianModelForCausalLM,
    HMCConfig,
    LaplaceConfig,
    MeanFieldConfig,
    PenaltyConfig,
    SGHMCConfig,
    fit_laplace,
)
from hf_bayes.core.types import Evaluation
from hf_bayes.distributed.mesh import ChainMesh
from hf_bayes.distributions.covariance import dense
from hf_bayes.fit import laplace as laplace_fit
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.laplace import gradient_estimate
from hf_bayes.methods.laplace.supported import STRUCTURES, CurvatureSpec
from hf_bayes.models.attaching import attach
from hf_bayes.objectives import own_settings
from hf_bayes.objectives.curvature_pass import run_curvature_pass
from hf_bayes.objectives.heldout import HeldOutRows
from hf_bayes.objectives.model_of_update import ModelOfUpdate
from hf_bayes.objectives.range_test import RATES, TrialPlan
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs
from tests.tiny_models import batch, tiny_bert, tiny_gpt2, tiny_tokenizer, with_lora

CHAINS = 4
MOVES = ("all_reduce", "all_gather", "broadcast", "all_gather_object", "broadcast_object_list", "reduce", "gather",
         "all_to_all", "all_gather_into_tensor", "reduce_scatter_tensor", "gather_object", "scatter")  # fmt: skip


class FirstGradient:
    """Keeps the first gradient of a run."""

    value: Tensor | None = None

    @classmethod
    def watch(cls) -> None:
        evaluate = ModelOfUpdate.__call__

        def watched(self: ModelOfUpdate, *args: Any, **options: Any) -> Evaluation:
            evaluation = evaluate(self, *args, **options)
            if cls.value is None and evaluation.grad_log_lik is not None:
                cls.value = evaluation.grad_log_lik.clone()
            return evaluation

        ModelOfUpdate.__call__ = watched  # type: ignore[method-assign]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from runs.token_rows(30)


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Bytes that this process hands to torch.distributed while open: of all calls, and of the largest."""
    found = {"calls": 0, "bytes": 0, "largest": 0}

    def counted(move: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[1] if move.__name__.startswith(("all_gather", "all_to_all")) else args[0]
            size = given.nbytes if isinstance(given, Tensor) else len(pickle.dumps(given))
            found.update(calls=found["calls"] + 1, bytes=found["bytes"] + size, largest=max(found["largest"], size))
            return move(*args, **kwargs)

        return call

    with unittest.mock.patch.multiple(dist, **{name: counted(getattr(dist, name)) for name in MOVES}):
        yield found


class Writes:
    """Files under ``root`` that this process opens for writing: the first one's renames put all of them in force."""

    def __init__(self, root: Path) -> None:
        self.root, self.names = root, set[str]()
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if isinstance(args[0], (str, os.PathLike)) and Path(args[0]).is_relative_to(self.root):
            self.names.add(Path(args[0]).relative_to(self.root).as_posix())


def deaf(rows: HeldOutRows, theta: Tensor, what: Any, *, gradient: bool, call: Any = HeldOutRows.__call__) -> Any:
    """Evaluate held-out rows with the sum over processes left out: each process returns the sum over its own rows."""
    rows.mesh = copy.copy(rows.mesh)
    rows.mesh.sum_over_data = lambda tensor: tensor
    return call(rows, theta, what, gradient=gradient)


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
        with unittest.mock.patch.object(own_settings, "plan_trial", return_value=TrialPlan(RATES, 4)):
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
        heldout = runs.token_rows(5, seed=5)
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
            for name, call in (("heldout", HeldOutRows.__call__), ("deaf_heldout", deaf)):
                if name == "heldout" or chains == 1:
                    with unittest.mock.patch.object(HeldOutRows, "__call__", call):
                        trainer = self.trainer(
                            f"{name}{chains}", method, data_size=size, per_device_train_batch_size=4,
                            eval_dataset=heldout,
                        )  # fmt: skip
                        trainer.train()
                    self.numbers[f"{name}{chains}"] = trainer.posterior.config.diagnostics["laplace"]
            labels = torch.randn(12, generator=torch.Generator().manual_seed(0)).tolist()
            rows = [{**row, "label": label} for row, label in zip(runs.label_rows(12), labels, strict=True)]
            trainer = runs.trainer(
                self.out / f"noise{chains}",
                LaplaceConfig(num_chains=chains, structure="full", num_samples=None, fit_noise=True, init_jitter=0.1),
                model=tiny_bert(dtype=torch.float64, num_labels=1, hidden_size=4),
                train=rows,
                subspace="last_layer",
                noise_std=2.0,
                per_device_train_batch_size=4 // size,
            )
            trainer.train()
            self.numbers[f"noise{chains}"] = trainer.posterior.config.head["noise_std"]

    def calibrated(self) -> None:
        """The temperature of a mixture, of chains of their own and of chains that processes share."""
        for chains in (4, 2):
            trainer = self.trainer(
                f"calibrated{chains}", EnsembleConfig(num_chains=chains, prior_std=1.0, init_jitter=0.1),
                data_size=max(1, dist.get_world_size() // chains), learning_rate=0.1,
                eval_dataset=runs.token_rows(45, seed=5), max_steps=12,
            )  # fmt: skip
            trainer.train()
            self.numbers[f"calibrated{chains}"] = trainer.posterior.config.calibration
            self.numbers[f"calibrated{chains}/shown"] = trainer.bayesian.mixture_temperature

    def look(self) -> None:
        """The Laplace pass, its nine rows shared; and, for the twin, without a word between processes."""
        rows = runs.token_rows([8, 5, 7, 8, 3, 8, 6, 4, 7])
        mesh, deaf = ChainMesh(1, torch.device("cpu")), ChainMesh(1, torch.device("cpu"))
        deaf.sum_over_data = lambda tensor: tensor
        collate = runs.padding_collator()

        def batches(numbers: Any) -> Any:
            return (collate([rows[number] for number in numbers[start : start + 2]])
                    for start in range(0, len(numbers), 2))  # fmt: skip

        with attach(with_lora(tiny_gpt2(dtype=torch.float64))) as model:
            combinations = {
                structure: CurvatureSpec(structure=structure) for structure in STRUCTURES if structure != "full"
            }
            combinations |= {estimator: CurvatureSpec(estimator=estimator) for estimator in ("ef_sequence", "ef_token")}
            combinations["reduce"] = CurvatureSpec(structure="kronecker_corrected", sharing="reduce")
            for structure, spec in combinations.items():
                for name, processes in (("look", mesh), ("deaf", deaf)):
                    found = run_curvature_pass(model, model.theta[0].detach(), batches, len(rows), spec, mesh=processes)
                    whole = spec.structure != "diagonal"  # else the rest is zeros
                    matrix = found.curvature.dense() if whole else found.curvature.diagonal
                    self.tensors[f"{name}/{structure}"] = matrix.contiguous()
                    self.tensors[f"{name}/{structure}/gradient"] = found.gradient.half_batch_gradients.contiguous()
                    with unittest.mock.patch.multiple(gradient_estimate, SMALL=0, LEAST_ROWS=4):  # of nine rows
                        part = run_curvature_pass(
                            model, model.theta[0].detach(), batches, len(rows), spec, mesh=processes
                        )
                    self.tensors[f"{name}/{structure}/halves"] = part.gradient.half_batch_gradients.contiguous()
                    sums = torch.tensor([found.log_lik, found.num_terms], dtype=torch.float64)
                    self.tensors[f"{name}/{structure}/sums"] = sums

        labels = runs.label_rows(9)

        def labelled(numbers: Any) -> Any:
            return (default_data_collator([labels[number]]) for number in numbers)

        with attach(tiny_bert(dtype=torch.float64, hidden_size=4, intermediate_size=6), subspace="last_layer") as model:
            for estimator in ("ggn", "hessian"):
                spec = CurvatureSpec(estimator=estimator, structure="full")
                for name, processes in (("look", mesh), ("deaf", deaf)):
                    found = run_curvature_pass(
                        model, model.theta[0].detach(), labelled, len(labels), spec, mesh=processes
                    )
                    self.tensors[f"{name}/{estimator}"] = found.curvature.dense().contiguous()

        for name, processes in (("look", mesh), ("deaf", deaf)):
            with unittest.mock.patch.object(laplace_fit, "ChainMesh", lambda *args, made=processes: made):
                method = LaplaceConfig(structure="kronecker", prior_std=0.5)
                posterior = fit_laplace(
                    with_lora(tiny_gpt2(dtype=torch.float64)), rows, method, collate=collate, batch_size=2
                )
            approximation, (note,) = posterior.approximation, posterior.config.diagnostics["laplace"]
            precision = torch.linalg.inv(dense(approximation.covariances[0], approximation.means))
            self.tensors[f"{name}/fit"] = precision.contiguous()
            found = [note[key] for key in ("log_lik", "log_evidence", "gradient_norm", "displacement")]
            self.tensors[f"{name}/fit/note"] = torch.tensor(found, dtype=torch.float64)

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
    worker.look()
    worker.generate()
    worker.refuse()
    worker.refuse_rows()
    worker.write()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
