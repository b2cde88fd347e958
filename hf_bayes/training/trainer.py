"""A transformers Trainer that ends in a posterior: every hook of Trainer delegates to the objects of a run."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import CommitInfo
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PredictionOutput, TrainOutput

from hf_bayes.chains.run import Run
from hf_bayes.core.config import MethodConfig
from hf_bayes.models.base import BayesianModel
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.checks.arguments import refuse_accelerator, refuse_types
from hf_bayes.training.checks.host_trainers import likelihood_for, refuse_foreign_methods, refuse_order
from hf_bayes.training.data.rows import TrainingRows
from hf_bayes.training.dpo_reference import reference_given
from hf_bayes.training.evaluation import Step
from hf_bayes.training.outcome import NO_POSTERIOR, Outcome
from hf_bayes.training.private_hooks import PrivateHooks
from hf_bayes.training.pushing import push
from hf_bayes.training.reports.monitor import Monitor
from hf_bayes.training.saving import SavedPosterior
from hf_bayes.training.session import begin, required, take_data
from hf_bayes.training.setup import Setup, set_up
from hf_bayes.training.termination import save_at_the_end_of_updates
from hf_bayes.training.trainer_host import TrainerHost, without_data_parallel
from hf_bayes.uncertainty.custom.base import LikelihoodConfig


class BayesianTrainerMixin(PrivateHooks):
    """A mixin for transformers' Trainer or TRL's: ``class BayesianSFT(BayesianTrainerMixin, SFTTrainer)``.

    Args:
        model: a transformers or peft model; what it makes trainable is random (or ``subspace``). Where ``args`` has
            ``model_init_kwargs``, as TRL's SFTConfig does, the name or path of a model, too.
        method: a config of ``hf_bayes.METHODS``; None takes SGHMC, whose temperature held-out rows choose, or a deep
            ensemble if these are too few, the run is too short, or it has several processes (``methods.recommended``).
        args: ``BayesianTrainingArguments``, which are needed.
        subspace: see ``hf_bayes.core.layout.select``.
        prior: a posterior, its directory or Hub id, in place of ``prior_std``; chains start at its mean.
        peft_config: the adapter to put on ``model``, such as ``LoraConfig(...)``; it is random, and the base is frozen.
        likelihood: the likelihood of the labels, such as ``Heteroscedastic()`` (docs/likelihoods.md); None takes the
            one that transformers reads from the head's configuration.
        kwargs: for the trainer after the mixin.
    Attributes:
        setup: the settings that do not change after construction: model, method, mesh, start.
        rows: the training rows; None without ``train_dataset``.
        active: the last run; None before ``train``.
        diagnosis: its diagnostics, and the checkpoints that it can be resumed from.
        outcome: its posterior, and evaluation.
        saved: the posterior as it is saved, with the author's fields of its card.
    Raises:
        ValueError: before anything runs, for settings with which the method would not sample its target.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_order(cls, BayesianTrainerMixin)

    def __init__(
        self,
        model: PreTrainedModel | PeftModel | BayesianModel | str | os.PathLike[str] | None = None,
        method: MethodConfig | None = None,
        args: BayesianTrainingArguments | None = None,
        *,
        subspace: str = "trainable",
        prior: Posterior | str | os.PathLike[str] | None = None,
        peft_config: PeftConfig | None = None,
        likelihood: LikelihoodConfig | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_foreign_methods(type(self), BayesianTrainerMixin)
        args = copy.copy(refuse_types(type(self), model, args, kwargs))  # the caller's own stay as they are
        likelihood = likelihood_for(type(self), likelihood, args, kwargs)
        self.rows: TrainingRows | None = None
        self.active: ActiveRun | None = None
        with set_up(
            model, method, args, subspace=subspace, prior=prior, peft_config=peft_config, kwargs=kwargs,
            likelihood=likelihood,
        ) as setup:  # fmt: skip
            self.setup: Setup = setup
            self.outcome = Outcome(setup)
            self.saved = SavedPosterior(self.outcome)
            with reference_given(self, setup.model, kwargs):
                super().__init__(model=setup.model, args=args, **kwargs)
            save_at_the_end_of_updates(self, setup.mesh)
            self.rows = take_data(TrainerHost(self), setup)

    @property
    def bayesian(self) -> BayesianModel:
        """The model with a member axis. It predicts by members, also where the posterior predicts in another way."""
        return self.setup.model

    @property
    def method(self) -> MethodConfig:
        """The config of the method, for batches of this size; in a run, with numbers in place of what was left open."""
        return (self.active or self.rows or self.setup).method

    @property
    def adamw_learning_rate(self) -> float | None:
        """The peak learning rate of AdamW in the last ``train``, given or found; None if there was no AdamW."""
        return required(self.active).adamw_learning_rate

    @property
    def run(self) -> Run[Any]:
        """The chains of the last ``train``."""
        return required(self.active).run

    @property
    def monitor(self) -> Monitor:
        """The observations of these chains."""
        return required(self.active).monitor

    @property
    def posterior(self) -> Posterior:
        """The result of ``train``; with several processes, the draws of the chains of this process."""
        return required(self.outcome.posterior, NO_POSTERIOR)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's ``train``; afterwards ``posterior`` holds the result, and evaluation and prediction use it.

        Raises:
            ValueError: if the output directory cannot hold a posterior, or the run is too short for its draws.
            FloatingPointError: at the step at which something becomes NaN or infinite.
        """
        begun = begin(TrainerHost(self), self.setup, self.rows, resume_from_checkpoint)
        self.active, self.diagnosis = begun.active, begun.diagnosis
        self.optimizer, self.lr_scheduler = begun.learning_rate, begun.scheduler  # Trainer makes no others
        self.outcome.begin(begun.active)
        self.resumed_from = begun.checkpoint
        if begun.end is None:
            with begun.active.trunk_memory():
                output = super().train(begun.checkpoint, *args, **kwargs)
        else:
            self.state, output = begun.end, TrainOutput(begun.end.global_step, 0.0, {})
        self.outcome.finish(begun.active, begun.diagnosis)
        return output

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Collect the micro-batches of an update; advance the chains at the last one. Return the mean loss per term."""
        rate = float(required(self.optimizer).param_groups[0]["lr"])
        return required(self.active).take(inputs, rate, is_last=self.accelerator.sync_gradients)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return an optimizer that only holds the learning rate; ``Run.update`` advances the chains."""
        return required(self.optimizer)

    def create_accelerator_and_postprocess(self) -> None:
        """Make Trainer's accelerator, which wraps no model in DistributedDataParallel: that would average chains."""
        super().create_accelerator_and_postprocess()
        refuse_accelerator(self.accelerator)
        without_data_parallel(self.accelerator)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return rows by chain, with no sampler of Trainer's, and not sharded by accelerate."""
        rows = required(self.rows, "training needs a train_dataset")
        return rows.start_loader(before_update=self.restore_generators)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """Return the micro-batches of an update; the objective counts their likelihood terms."""
        rows = required(self.rows)
        if rows.stream is None:  # a stream does so itself, after it has read the rows to skip
            self._load_rng_state(self.resumed_from)
        return rows.take(epoch_iterator, num_batches), None

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return R, the number of rows in an update of a chain, over all processes that share it."""
        return required(self.rows).rows_per_update

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return Trainer's estimate, for the members here: each runs the wrapped model."""
        return required(self.active).floating_point_ops(inputs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add numbers of each chain for trackers and ``log_history``; printed lines hold means (``step_lines``)."""
        if self.diagnosis is not None and "loss" in logs:
            self.diagnosis.add_to(logs)
        super().log(logs, *args, **kwargs)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Trainer's ``evaluate``; after training, as a model that is loaded from the posterior predicts."""
        with self.outcome.predicting():
            metrics = super().evaluate(eval_dataset, *args, **kwargs)
        if eval_dataset is None and self.outcome.posterior is not None and not args and not kwargs:
            self.outcome.keep_evaluation()
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Trainer's ``predict``; after training, as a model that is loaded from the posterior predicts."""
        with self.outcome.predicting():
            return super().predict(*args, **kwargs)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        loop = partial(super().evaluation_loop, *args, **{**kwargs, "metric_key_prefix": metric_key_prefix})
        return self.outcome.evaluator.run(loop, metric_key_prefix)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Step:
        own = partial(super().prediction_step, model, prediction_loss_only=prediction_loss_only)
        host, keep = TrainerHost(self), not prediction_loss_only
        return self.outcome.evaluator.step(inputs, host, keep_logits=keep, without_labels=own, ignored=ignore_keys)

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse Trainer's search, each trial of which would need a model of its own."""
        raise ValueError(
            "hyperparameter_search is refused: it makes a model for each trial, and the chains are attached to one "
            "model. Call hf_bayes.tune, which compares methods and settings (docs/automatic.md, Which method is best "
            "for my data?)"
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the posterior directory (``SavedPosterior``); checkpoints (``_internal_call``) have their own files.

        With ``push_to_hub`` of the arguments, it is uploaded, too, as Trainer does.
        """
        directory = str(output_dir or self.args.output_dir)
        if _internal_call:
            Path(directory).mkdir(parents=True, exist_ok=True)
            return
        self.saved.save(TrainerHost(self), self.active, directory)
        if self.args.push_to_hub:
            push(self.saved, TrainerHost(self), directory, commit_message="Model save")

    def push_to_hub(  # type: ignore[override]
        self, commit_message: str | None = "End of training", blocking: bool = True, token: str | None = None,
        revision: str | None = None, *, private: bool | None = None, **card: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:  # fmt: skip
        """Save, and upload the posterior's own files; ``pushing.push`` explains the settings.

        ``card`` has fields of the model card: license, language, datasets (or dataset_tags), tags and model_name.
        """
        host, directory = TrainerHost(self), str(self.args.output_dir)
        self.saved.keep_card(card)
        self.saved.save(host, self.active, directory)
        to: dict[str, Any] = {"token": token, "revision": revision, "private": private}
        return push(self.saved, host, directory, commit_message=commit_message, blocking=blocking, **to)

    def create_model_card(self, *_: Any, **card: Any) -> None:
        """Keep the author's fields of the model card, as in ``push_to_hub``; write a saved posterior's card anew."""
        self.saved.write_card(TrainerHost(self), card)


class BayesianTrainer(BayesianTrainerMixin, Trainer):
    """``transformers.Trainer`` that ends in a posterior; see ``BayesianTrainerMixin``."""
