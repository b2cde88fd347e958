"""What a run leaves on disk: the posterior at its end, checkpoints on the way."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import SchedulerType

from hf_bayes import base_model, checkpoints
from hf_bayes.artifact import Posterior
from hf_bayes.config import MethodConfig
from hf_bayes.model import BayesianModel
from hf_bayes.posterior_config import PosteriorConfig

if TYPE_CHECKING:  # a mixin: put before any Trainer, it finds that one's methods
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

_KEPT_METRICS = ("nll", "accuracy", "ece", "brier", "total", "aleatoric", "epistemic", "member_nll", "perplexity")


class SavingMixin(_Trainer):
    """The trainer's posterior, its directory, and checkpoints with one file a chain."""

    bayesian: BayesianModel
    method: MethodConfig
    subspace: str
    num_data: float
    _posterior: Posterior | None

    @property
    def posterior(self) -> Posterior:
        """The result of ``train``.

        Raises:
            ValueError: before it.
        """
        if self._posterior is None:
            raise ValueError("there is no posterior yet: call train() first")
        return self._posterior

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the posterior directory, with held-out metrics if there is an eval_dataset.

        Checkpoints (``_internal_call``) have files of their own.
        """
        if _internal_call:
            Path(output_dir or self.args.output_dir).mkdir(parents=True, exist_ok=True)
            return
        posterior = self.posterior
        if self.eval_dataset is not None and not posterior.config.metrics:
            posterior = self._posterior = self._with_metrics(posterior)
        directory = output_dir or self.args.output_dir
        posterior.save_pretrained(directory)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(directory)

    def _with_metrics(self, posterior: Posterior) -> Posterior:
        """Held-out metrics of the posterior, beside those of the point estimate that a warm start left."""
        metrics = self.evaluate(metric_key_prefix="eval")
        sets = [f"{name}_" for name in self.eval_dataset] if isinstance(self.eval_dataset, dict) else [""]
        names = [name + metric for name in sets for metric in _KEPT_METRICS]
        found = {name: metrics[f"eval_{name}"] for name in names if f"eval_{name}" in metrics}
        reference = self._chains_optimizer.reference
        if reference is not None:
            chains = self._chains_optimizer
            finished, chains.finished = chains.finished, reference[:1].to(self.args.device)
            try:
                point = self.evaluate(metric_key_prefix="map")
            finally:
                chains.finished = finished
                chains.eval()
            found |= {f"{name}map_nll": point[f"map_{name}nll"] for name in sets}
        return dataclasses.replace(posterior, config=dataclasses.replace(posterior.config, metrics=found))

    def push_to_hub(self, commit_message: str | None = "End of training", blocking: bool = True, **kwargs: Any) -> str:
        """Save, and upload the posterior's own files: never training_args.bin, checkpoints or tokens."""
        self.save_model()
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        return self.posterior.push_to_hub(
            name, token=self.args.hub_token, private=self.args.hub_private_repo, commit_message=commit_message
        )

    def _to_posterior(self, approximation: Any, diagnostics: dict[str, Any]) -> Posterior:
        args, bayesian, config = self.args, self.bayesian, self.method
        return Posterior(
            approximation=approximation,
            adapter_config=base_model.adapter_config(bayesian.model),
            config=PosteriorConfig(
                task=self.bayesian.task,
                method=config.to_dict(),
                approximation=approximation.kind,
                parameters=[[n, list(s)] for n, s in zip(bayesian.layout.names, bayesian.layout.shapes, strict=True)],
                num_members=approximation.num_stored,
                subspace=self.subspace,
                prior={"std": config.prior_std if config.prior_std is not None else 1.0, "mean": config.prior_mean},
                num_data=self.num_data,
                data_unit=args.data_unit,
                base_model=base_model.describe(bayesian.model, bayesian.core, bayesian.layout, self.processing_class),
                head=base_model.describe_head(bayesian.core, args.noise_std),
                seed=args.seed,
                diagnostics=diagnostics,
            ),
        )

    # -- checkpoints: private hooks of Trainer, whose signatures a test pins -------------------------------------

    def _settings(self) -> dict[str, Any]:
        """What a resumed run must share with the one that was saved."""
        args, layout = self.args, self.bayesian.layout
        return {
            "method": self.method.to_dict(),
            "num_updates": self._chains_optimizer.num_updates,
            "num_rows": len(self.train_dataset),
            "num_data": self.num_data,
            "rows_per_update": self.get_total_train_batch_size(args),
            "minibatch": args.minibatch,
            "learning_rate": args.learning_rate,
            "lr_scheduler_type": SchedulerType(args.lr_scheduler_type).value,
            "lr_scheduler_kwargs": args.lr_scheduler_kwargs or {},
            "warmup_steps": args.warmup_steps,
            "noise_std": args.noise_std,
            "num_steps": self._num_steps(),
            "seed": args.seed,
            "data_seed": args.data_seed,
            "parameters": [[name, list(shape)] for name, shape in zip(layout.names, layout.shapes, strict=True)],
        }

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        checkpoints.save(output_dir, self._chains_optimizer.chain_tensors(), self._settings())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Refuse what cannot go on, before anything runs; the base model is the one given, not a checkpoint's."""
        checkpoints.load(resume_from_checkpoint, self._settings())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            tensors, saved = checkpoints.load(checkpoint, self._settings())
            self._chains_optimizer.load_chain_tensors(tensors, saved["num_updates"])

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> None:
        """None: the norm over all chains together means nothing, and theta holds no gradient."""
