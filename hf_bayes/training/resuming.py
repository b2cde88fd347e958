"""The trainer's checkpoints: what they are bound to, and the hooks of Trainer that write and read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import SchedulerType
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.hashing import fingerprint_tensors
from hf_bayes.distributed.mesh import ChainMesh
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.inherited_prior import Inherited
from hf_bayes.objectives.data_rows import is_stream
from hf_bayes.training import checkpoints, run_identity
from hf_bayes.training.data_fingerprint import describe_rows
from hf_bayes.training.mixin import AnyTrainer
from hf_bayes.training.stratified_rows import Strata


class ResumingMixin(AnyTrainer):
    """Checkpoints that resume the same run and no other (``checkpoints``, ``run_identity``)."""

    bayesian: BayesianModel
    method: MethodConfig
    chains: range
    mesh: ChainMesh
    num_data: float
    num_rows: int | None
    strata: Strata | None
    inherited: Inherited | None
    _start: Tensor
    _describe_data: Callable[[], dict[str, Any]]
    _without_unused: Callable[..., tuple[Any, Callable]]
    _heldout_rows: Any
    _identity: dict[str, Any] | None = None
    """What checkpoints of the current ``train`` are bound to, as found before its first update."""

    def _settings(self) -> dict[str, Any]:
        """Return what a resumed run must share with the one that was saved."""
        args, layout = self.args, self.bayesian.layout
        if self._identity is None:
            self._identity = self._identify()
        return {
            **self._identity,
            "method": self.method.to_dict(),
            "prior": None if self.inherited is None else self.inherited.record["fingerprint"],
            "prior_mean": self._centre(),
            "num_updates": self._chains_optimizer.num_updates,
            "num_rows": self.num_rows,
            "private_rows": None if self.strata is None else list(self.strata.sizes),
            "num_data": self.num_data,
            "data_unit": args.data_unit,
            "rows_per_update": self.get_total_train_batch_size(args),
            "minibatch": args.minibatch,
            "learning_rate": args.learning_rate,
            "lr_scheduler_type": SchedulerType(args.lr_scheduler_type).value,
            "lr_scheduler_kwargs": args.lr_scheduler_kwargs or {},
            "warmup_steps": args.warmup_steps,
            "noise_std": args.noise_std,
            "probe_steps": args.probe_steps,  # looks that were kept and new ones are one sequence
            "num_steps": self._num_steps(),
            "seed": args.seed,
            "data_seed": args.data_seed,
            "parameters": [[name, list(shape)] for name, shape in layout.named_shapes.items()],
            "device": args.device.type,  # generators of another kind draw other numbers, and take no state from these
        }

    def _identify(self) -> dict[str, Any]:
        """Return what a checkpoint is bound to; all processes call it together (``run_identity``)."""
        args, data, heldout = self.args, self._describe_data(), None
        matters = run_identity.split_matters(
            self.method,
            self.bayesian.model,
            stream=is_stream(self.train_dataset),
            private=self.strata is not None,
            packs=data["packs"],
        )
        micro_batches = args.gradient_accumulation_steps * (1 if self.strata else self.mesh.data_size)
        if self.method.requirements.heldout != "none":
            rows, collate = self._without_unused(self._heldout_rows, "evaluation")
            heldout = {"num_rows": len(rows), **describe_rows(rows, collate, seed=args.seed)}
        return run_identity.identity(
            self.bayesian,
            tokenizer=self.processing_class,
            mixed_precision=self.accelerator.mixed_precision,
            data=data,
            heldout=heldout,
            micro_batches=micro_batches if matters else None,
        )

    def _centre(self) -> str:
        """Return a fingerprint of the prior's mean: weights that were drawn anew would be those of another prior."""
        if self.method.prior_mean == "zero" or self.inherited is not None:
            return "zero"
        return fingerprint_tensors([("prior_mean", self._start)])

    # -- private hooks of Trainer, whose signatures a test pins --------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Seal a checkpoint once all of its files are there, and only then remove older ones."""
        args, run_dir = self.args, self._get_output_dir(trial=trial)
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            args.save_total_limit = limit
        folder = Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        checkpoints.seal_checkpoint(folder, group=self.mesh)
        if args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(run_dir, save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoints.begin(output_dir, group=self.mesh)
        super()._save_optimizer_and_scheduler(output_dir)
        tensors = self._chains_optimizer.chain_tensors() if self.mesh.data_rank == 0 else {}
        checkpoints.save(output_dir, tensors, self._settings(), group=self.mesh)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Refuse what cannot go on, before anything runs; the base model is the one given, not a checkpoint's."""
        checkpoints.load(resume_from_checkpoint, self._settings(), chains=self.chains)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            tensors, saved = checkpoints.load(checkpoint, self._settings(), chains=self.chains)
            self._chains_optimizer.load_chain_tensors(tensors, saved["num_updates"])
