"""The checkpoints of a run: the settings they are bound to, and the tensors of its chains.

``checkpoints`` writes and reads the files; ``run_identity`` describes model and data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import SchedulerType, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from hf_bayes.core.hashing import fingerprint_tensors
from hf_bayes.training import checkpoints, run_identity
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.checkpoints import SavedRun
from hf_bayes.training.data.heldout_rows import HeldOutData
from hf_bayes.training.data.rows import TrainingRows
from hf_bayes.training.setup import Setup
from hf_bayes.training.trainer_host import TrainerHost


class RunCheckpoints:
    """The checkpoints of a run: save them, and resume only the same run.

    Args:
        active: the run.
        identified: describe model and data now, before the first update; otherwise at the first save.
    """

    def __init__(self, active: ActiveRun, *, identified: bool) -> None:
        self._active = active
        self._identity = self._identify() if identified else None

    def save(self, folder: str) -> None:
        """Write the chains of this process; if processes share chains, only the first of them writes."""
        mesh = self._active.setup.mesh
        tensors = self._tensors() if mesh.data_rank == 0 else {}
        checkpoints.save(folder, tensors, self.settings(), group=mesh)

    def check(self, saved: SavedRun) -> None:
        """Refuse a checkpoint of another run, or with damaged chains, by name. Nothing changes."""
        self._chains_of(saved)

    def load(self, folder: str) -> None:
        """Restore the chains from a checkpoint, after another check of its files: they may differ since ``check``."""
        active, chains, saved = self._active, self._active.setup.mesh.chains, checkpoints.verified(folder)
        found = self._chains_of(saved)
        rows = [found[chain] for chain in chains]
        names = set(rows[0])
        for chain, row in zip(chains, rows, strict=True):
            if set(row) != names:
                raise ValueError(
                    f"chain {chain} of the checkpoint has tensors {sorted(row)}, expected {sorted(names)}: it was "
                    "written by another method"
                )
        stacked = {name: torch.stack([row[name] for row in rows]) for name in sorted(names)}
        observed = {name: value for name, value in stacked.items() if active.monitor.holds(name)}
        run = {name: value for name, value in stacked.items() if name not in observed}
        active.run.load_state_dict(run, saved.num_updates)
        active.monitor.load_state_dict(observed)
        active.show_chains()

    def load_end(self, folder: str) -> TrainerState:
        """Load a checkpoint that is the end of the run, and return Trainer's state there."""
        self.load(folder)
        self._active.host.say("checkpoint %s is the end of this run: nothing is left to train", folder)
        return cast(TrainerState, TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME)))

    def _chains_of(self, saved: SavedRun) -> dict[int, dict[str, Tensor]]:
        """Return the tensors of the chains of this process, by number, from a checkpoint of the same run."""
        return checkpoints.load(saved, self.settings(), chains=self._active.setup.mesh.chains)

    def _tensors(self) -> dict[int, dict[str, Tensor]]:
        """Return {chain: all tensors that it needs to continue}."""
        run = self._active.run.state_dict()
        if not run:
            return {}
        whole = {**run, **self._active.monitor.state_dict()}
        return {
            chain: {name: value[row].contiguous() for name, value in whole.items()}
            for row, chain in enumerate(self._active.setup.mesh.chains)
        }

    def settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with the saved run."""
        active, args = self._active, self._active.host.args
        if self._identity is None:
            self._identity = self._identify()
        return {
            **self._identity,
            **settings_of_run(active.host, active.setup, active.rows),
            "method": active.method.to_dict(),
            "prior_mean": self._centre(),
            "num_updates": active.run.num_updates,
            "found_rate": active.settings.found_rate,
            checkpoints.NOISE: None if active.noise is None else active.noise.of_run,
            "probe_steps": args.probe_steps,  # probe values that were kept and new ones are one sequence
            "num_steps": active.problem.num_steps,
            "device": args.device.type,  # generators of another kind draw other numbers, and take no state from these
            **({checkpoints.RUN: active.number} if active.number else {}),
        }

    def _identify(self) -> dict[str, Any]:
        """Return the identity of model and data that a checkpoint is bound to; all processes call this together."""
        active, rows, setup, host = self._active, self._active.rows, self._active.setup, self._active.host
        data = rows.describe()
        matters = run_identity.split_matters(
            active.method,
            setup.model.model,
            stream=rows.stream is not None,
            private=rows.private is not None,
            packs=data["packs"],
        )
        micro_batches = host.args.gradient_accumulation_steps * (1 if rows.private else setup.mesh.data_size)
        fits_on_heldout = active.method.requirements.heldout != "none" or active.noise is not None
        return run_identity.identity(
            setup.model,
            tokenizer=host.tokenizer,
            mixed_precision=host.mixed_precision,
            data=data,
            heldout=HeldOutData(host).describe() if fits_on_heldout else None,
            micro_batches=micro_batches if matters else None,
        )

    def _centre(self) -> str:
        """Return a fingerprint of the prior's mean, because newly initialised weights would be another prior."""
        setup = self._active.setup
        if self._active.method.prior_mean == "zero" or setup.inherited is not None:
            return "zero"
        return fingerprint_tensors([("prior_mean", setup.start)])


def settings_of_run(host: TrainerHost, setup: Setup, rows: TrainingRows) -> dict[str, Any]:
    """Return the settings of a trainer that decide its result, whatever the method; JSON-ready.

    ``run_identity.identity`` has those of the model and of the content of the data.
    """
    args = host.args
    return {
        "prior": None if setup.inherited is None else setup.inherited.record["fingerprint"],
        "num_rows": rows.num_rows,
        "private_rows": None if rows.private is None else list(rows.private.sizes),
        "num_data": rows.num_data,
        "data_unit": args.data_unit,
        "rows_per_update": rows.scale.rows_per_update,
        "minibatch": args.minibatch,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": SchedulerType(args.lr_scheduler_type).value,
        "lr_scheduler_kwargs": args.lr_scheduler_kwargs or {},
        "warmup_steps": args.warmup_steps,
        "noise_std": args.noise_std,
        "seed": args.seed,
        "data_seed": args.data_seed,
        "parameters": [[name, list(shape)] for name, shape in setup.model.layout.named_shapes.items()],
    }
