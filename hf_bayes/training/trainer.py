"""A transformers Trainer that ends in a posterior. It knows rules and kernels, and no method by name."""

from __future__ import annotations

import logging
import math
import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, SchedulerType, Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy, TrainOutput

from hf_bayes.chains.starting_points import initial_members
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import chain_generators, generator, seed_of
from hf_bayes.core.schedules import burn_in_steps, draw_steps
from hf_bayes.core.types import Evaluation, Kernel, Problem
from hf_bayes.diagnostics.plausibility import has_strayed
from hf_bayes.distributed.member_sums import SpreadMembers
from hf_bayes.distributed.mesh import ChainMesh
from hf_bayes.distributions.priors import build_prior
from hf_bayes.members.trunk import TrunkMemory, num_rows_of
from hf_bayes.methods.registry import build, rate_factor
from hf_bayes.models.attaching import attach, refuse_frozen_adapter
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.inherited_prior import inherit
from hf_bayes.models.input_check import check_vocabulary
from hf_bayes.models.to_posterior import sidecars_of
from hf_bayes.objectives.data_rows import is_stream
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.storage import check_writable
from hf_bayes.training import checkpoints
from hf_bayes.training.after_training import RevisionMixin
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.chain_optimizer import ChainOptimizer
from hf_bayes.training.data import TrainingDataMixin
from hf_bayes.training.diagnosis import DiagnosisMixin
from hf_bayes.training.evaluation import EvaluationMixin
from hf_bayes.training.gradient_noise import HalvesMixin
from hf_bayes.training.host_trainers import config_kept, refuse_foreign_loss
from hf_bayes.training.prepared_model import prepared
from hf_bayes.training.refusals import (
    refuse_accelerator,
    refuse_arguments,
    refuse_other_weights,
)
from hf_bayes.training.reporting import ReportingMixin
from hf_bayes.training.resuming import ResumingMixin
from hf_bayes.training.saving import SavingMixin
from hf_bayes.training.step_lines import shorten_lines

logger = logging.getLogger(__name__)

SMALL_PASS_ROWS = 512
"""Rows (members x sequences x positions) up to which members are folded in training."""


class BayesianTrainerMixin(
    TrainingDataMixin,
    EvaluationMixin,
    ReportingMixin,
    DiagnosisMixin,
    HalvesMixin,
    RevisionMixin,
    ResumingMixin,
    SavingMixin,
):
    """Put before transformers' or TRL's SFT trainer: ``class BayesianSFT(BayesianTrainerMixin, SFTTrainer)``.

    Args:
        model: a transformers or peft model; what it makes trainable is random (or ``subspace``). Where ``args`` has
            ``model_init_kwargs``, as TRL's SFTConfig does, the name or path of a model, too.
        method: a config of ``hf_bayes.METHODS``.
        args: ``BayesianTrainingArguments``.
        subspace: see ``hf_bayes.core.layout.select``.
        prior: a posterior, its directory or Hub id, in place of ``prior_std`` (``hf_bayes.models.inherited_prior``).
            Chains then start at its mean.
        peft_config: the adapter to put on ``model`` before it is attached, such as ``LoraConfig(...)``; it is random
            then, and the base is frozen.
        kwargs: for the trainer after the mixin.
    Raises:
        ValueError: before anything runs, for settings under which the method would not sample what it says.
    """

    loss_is_scaled_for_ga = True
    _members: slice  # now in the model, with their
    _leaf: Tensor  # rows of theta,
    _loss: Tensor  # minus their log-likelihood, and
    _terms: Tensor  # the terms of the update, of all chains
    optimizer: Any
    optimizer_of_chains: ChainOptimizer | None

    def __init__(
        self,
        model: PreTrainedModel | PeftModel | BayesianModel | str | os.PathLike[str],
        method: MethodConfig,
        args: BayesianTrainingArguments,
        *,
        subspace: str = "trainable",
        prior: Posterior | str | os.PathLike[str] | None = None,
        peft_config: PeftConfig | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_foreign_loss(type(self), BayesianTrainerMixin)
        refuse_arguments(args, method, model, kwargs)
        check_writable(args.output_dir, overwrite=True)
        self.method, self.subspace = method, subspace
        self.mesh = ChainMesh(method.num_chains, args.device, together=args.private_rows)
        self.chains = self.mesh.chains
        # a model that was refused is given back as it was
        with prepared(model, args, peft_config, kwargs) as model, ExitStack() as on_error:
            if not isinstance(model, BayesianModel):
                model = attach(model, subspace=subspace, noise_std=args.noise_std)
                on_error.callback(model.detach)
            self.bayesian: BayesianModel = model.linearise(None)  # a chain leaves the Gaussian that was loaded
            refuse_frozen_adapter(model)
            self.likelihood = model.likelihood
            refuse_other_weights(model, self.mesh)
            # a fresh adapter or head, which every process has drawn for itself, is the first one's
            self._start = self.mesh.from_first(model.theta.detach()[0].clone())
            self.inherited = None if prior is None else inherit(prior, model, method, data_unit=args.data_unit)
            if self.inherited is not None:
                self._start = self.inherited.gaussian.mean.to(self._start)
            self._origin = initial_members(model.layout, self._start, method, seed=args.seed, chains=self.chains)
            model.theta.data = self._origin.clone()
            model.members_per_pass = args.members_per_pass
            self.optimizer_of_chains = None
            self._posterior = self._evaluated = None
            self._micro, self._losses = 0, None
            with config_kept(model.core.config):
                super().__init__(model=model, args=args, **kwargs)
            check_vocabulary(self.processing_class, model.core)
            if self.inherited is not None:
                self.inherited.check_tokenizer(self.processing_class)
            self._signature_columns = self._columns_to_keep()
            if self.train_dataset is not None:
                self._prepare_data()
            if method.requirements.heldout != "none":
                self._prepare_heldout()
            if self.mesh.chain_size > 1:  # an evaluation before training sees all chains, too
                model.show(model.theta.detach(), SpreadMembers(self.mesh.chain_group))
            on_error.pop_all()

    # -- the chains ----------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The method for this run, on all chains of this process."""
        if self.optimizer is None:
            args, config, bayesian = self.args, self.method, self.bayesian
            steps, micro_batches = self._num_steps(), args.gradient_accumulation_steps * self.mesh.data_size
            burn_in = max(burn_in_steps(config.burn_in, steps), config.warm_start_steps)
            draws = draw_steps(steps, burn_in=burn_in, draws=config.draws_per_chain, thin=config.thin)
            inherited = None if self.inherited is None else self.inherited.gaussian
            prior = build_prior(config, bayesian.layout, self._start, bayesian.model, inherited)
            self.problem = Problem(
                num_data=self.num_data,
                prior=prior.to(bayesian.theta),
                learning_rate=args.learning_rate,
                num_steps=steps,
                burn_in=burn_in,
                shapes=bayesian.layout.named_shapes,
                draw_steps=draws,
                batch_fraction=self._batch_fraction,
                most_terms=self.most_terms,
                root_columns=bayesian.num_root_columns,
                noise_std=getattr(self.likelihood, "noise_std", None),
                seed=args.seed,
            )
            self.prior = prior
            measure_noise = config.requirements.gradient_variance != "none"
            self.optimizer = self.optimizer_of_chains = ChainOptimizer(
                bayesian,
                build(config, self.problem),
                chain_generators(args.seed, config.num_chains, chains=self.chains, device=args.device),
                lr=args.learning_rate,
                draw_steps=draws,
                chains=self.chains,
                burn_in=burn_in,
                warm_start=config.warm_start_steps,
                measure_noise=measure_noise and micro_batches > 1,
                halve=measure_noise and micro_batches == 1,
                probe=self._probe,
                probe_steps=args.probe_steps,
            )
            if self.mesh.chain_size > 1:
                self.optimizer_of_chains.spread = SpreadMembers(self.mesh.chain_group)
        return self.optimizer

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's accelerator, which wraps no model in DistributedDataParallel: that would average chains."""
        super().create_accelerator_and_postprocess()
        refuse_accelerator(self.accelerator)
        prepare = self.accelerator.prepare_model

        def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
            return prepare(model, device_placement=device_placement, evaluation_mode=True)

        self.accelerator.prepare_model = prepare_model

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The method's schedule if it has one; else Trainer's, looked through to its end.

        Raises:
            ValueError: naming the step at which it leaves [0, learning_rate].
        """
        chains = self._chains_optimizer
        if self.method.schedule is not None:
            factor = partial(rate_factor, self.method, draw_steps=chains.draw_steps)
            self.lr_scheduler = LambdaLR(chains, factor)
            return self.lr_scheduler
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        for factor in getattr(scheduler, "lr_lambdas", ())[:1]:
            for step in range(num_training_steps):
                if not 0 <= factor(step) <= 1 + 1e-9:
                    raise ValueError(
                        f"lr_scheduler_type={SchedulerType(self.args.lr_scheduler_type).value!r} gives a learning "
                        f"rate of {factor(step) * self.args.learning_rate:g} at step {step + 1}: it must stay "
                        f"within 0 and learning_rate={self.args.learning_rate:g}, the peak that frictions are "
                        "fixed for. Change lr_scheduler_kwargs"
                    )
        return scheduler

    def _num_steps(self) -> int:
        if self.args.max_steps >= 0:
            return self.args.max_steps
        if is_stream(self.train_dataset):
            raise ValueError("train_dataset has no length, and max_steps is not set: an endless run. Set max_steps")
        rows = len(self.train_dataset) if self.strata is None else self.strata.num_rows
        updates = -(-rows // self.get_total_train_batch_size(self.args))
        return math.ceil(self.args.num_train_epochs * updates)

    def _member_chunks(self, inputs: dict[str, Any]) -> list[slice]:
        """Which members train together: as many as keep passes small.

        Long passes are bound by arithmetic, where folding gains little and costs the activations of every member; short
        ones by overhead, which folding divides. A shared trunk runs once for all passes, but for its dropout: then all
        go in one.
        """
        count = len(self.chains)
        rows = num_rows_of(inputs) // (1 if self._shared else count)
        trunk = self.bayesian.members.trunk
        if self._shared and trunk.num_blocks > 0 and self.bayesian.training and trunk.has_dropout:
            size = count
        else:
            size = max(1, SMALL_PASS_ROWS // (rows * self.bayesian.num_positions(inputs)))
        size = self.args.members_per_pass or size
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Forward and backward of a micro-batch, a few members at a time: its share of the mean loss per term."""
        chains = self._chains_optimizer
        self._micro = 0 if chains.begins_update else self._micro + 1
        assert num_items_in_batch is not None
        self._terms = num_items_in_batch
        if isinstance(chains.method, Kernel):
            return self._kernel_step(model, inputs)
        total = torch.zeros((), device=self.args.device)
        with self._trunk_once(inputs, shared=True):
            for members in self._member_chunks(inputs):
                self._members = members
                self._seed_dropout(members)
                rows = self._rows_of(inputs, members)
                with self._trunk_once(rows, shared=False):
                    total += super().training_step(model, rows, num_items_in_batch)
                assert self._leaf.grad is not None
                chains.accumulate(members, self._loss, self._leaf.grad)
                del self._leaf
        if chains.wants_halves:
            self._observe_halves(model, self._prepare_inputs(inputs))
        if self.accelerator.sync_gradients:
            chains.complete(self.mesh.sum_over_data, self._likelihood_scale(self._terms))
            self._losses = chains.loss / self._terms.clamp_min(1)
        return total

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """In training, minus the summed log-likelihood of the members in turn, per term of the update and chain."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._leaf = self._chains_optimizer.leaf(self._members)
        output = model(**inputs, theta=self._leaf, folded=not self._shared)
        self._loss = output.loss.detach()
        # Trainer logs the mean over processes; those that share chains have a part of the loss each
        share = len(self.chains) / self.mesh.data_size
        return _LoggedSum.apply(output.loss, self._terms[self._members] * share)

    def _trunk_once(self, inputs: dict[str, Any], *, shared: bool) -> AbstractContextManager[None]:
        """What surrounds the passes over a micro-batch that is ``shared``, or those over rows of a chain's own."""
        trunk = self.bayesian.members.trunk
        if shared != self._shared or (self.bayesian.training and trunk.has_dropout):
            return nullcontext()
        return trunk.once(inputs)

    def _seed_dropout(self, members: slice, part: int = 0) -> None:
        """Dropout masks are a function of seed, chain, step and micro-batch, so that a resumed run draws the same."""
        if self.bayesian.members.trunk.has_dropout:
            place = (self.chains[members.start], self.mesh.data_rank, self.state.global_step, self._micro + part)
            torch.manual_seed(seed_of(self.args.seed, "dropout", *place))

    # -- kernels -------------------------------------------------------------------------------------------------

    def _kernel_step(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Keep the micro-batch; after the last one of the update the kernel may evaluate them as often as it likes."""
        chains = self._chains_optimizer
        self._kernel_batches.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        # exact kernels have no use for dropout: the target would change from one evaluation to the next
        model.eval()
        kept, self._kernel_batches = self._kernel_batches, []
        count, first = len(kept) * self.mesh.data_size, self.mesh.data_rank  # of all processes, who take turns
        mine = dict(zip(range(first, count, self.mesh.data_size), kept, strict=True))
        if self.strata is not None:  # each has a part in every batch
            count, mine = len(kept), dict(enumerate(kept))
        terms = self._terms.double().clamp_min(1)
        start = proposed = torch.empty(0)  # of a run's first move the first evaluation is at the chains' starts

        def evaluate(theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation:
            nonlocal start, proposed
            chosen = range(count)[slice(None) if batches is None else batches]
            log_liks = torch.zeros(len(theta), count, dtype=torch.float64, device=theta.device)
            grad = torch.zeros_like(theta) if gradient else None
            for place in (place for place in chosen if place in mine):
                batch = mine[place]
                with self._trunk_once(batch, shared=True):
                    for members in self._member_chunks(batch):
                        leaf = theta[members].detach().requires_grad_(gradient)
                        with torch.set_grad_enabled(gradient), self.compute_loss_context_manager():
                            loss = model(**self._rows_of(batch, members), theta=leaf, folded=not self._shared).loss
                            if grad is not None:
                                grad[members] -= torch.autograd.grad(loss.sum(), leaf)[0]
                        log_liks[members, place] -= loss.detach()
            log_liks = log_liks[:, chosen.start : chosen.stop].contiguous()
            if self.strata is not None:
                log_liks = self.strata.part(log_liks)
                grad = None if grad is None else self.strata.weight * grad
            # the one thing that processes with other rows of these chains must tell each other: K numbers a chain
            log_liks = self.mesh.sum_over_data(log_liks)
            if grad is not None:
                self.mesh.sum_over_data(grad)
            share = len(chosen) / count
            proposed = -log_liks.sum(1) / (share * terms)
            start = proposed if start.numel() == 0 else start
            scale = torch.as_tensor(self._likelihood_scale(terms) / share, dtype=torch.float64, device=theta.device)
            scale = scale.view(-1, 1)
            if grad is not None:
                grad *= scale.to(grad.dtype)
            columns = None if self.method.requirements.all_data_in_every_update else len(chosen) * scale * log_liks
            # in float64: a kernel accepts by differences of a nat, and float32 counts energies near 1e7 in whole ones
            return Evaluation(scale[:, 0] * log_liks.sum(1), grad, batch_log_lik=columns)

        stays = chains.move(evaluate)
        # the loss of a chain that refused its proposal is not the proposal's
        self._losses = torch.where(stays, chains.held.get("loss", start), proposed)
        chains.held["loss"] = self._losses
        return self._losses.mean().float()

    _kernel_batches: list[dict[str, Any]]

    # -- the run -------------------------------------------------------------------------------------------------

    @property
    def _chains_optimizer(self) -> ChainOptimizer:
        assert self.optimizer_of_chains is not None
        return self.optimizer_of_chains

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's ``train``; afterwards ``posterior`` holds the result, and evaluation and prediction use it.

        Raises:
            ValueError: if the output directory cannot hold a posterior, or the run is too short for its draws.
            FloatingPointError: at the step at which something becomes NaN or infinite.
        """
        self.bayesian.members.require_attached()
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset, got None")
        check_writable(self.args.output_dir, overwrite=True)
        self._sidecars = sidecars_of(self.bayesian, self.processing_class)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = checkpoints.newest_complete(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"no complete checkpoint in {self.args.output_dir}: there is nothing to resume from")
        self._kernel_batches, self._posterior, self._evaluated, self._losses = [], None, None, None
        self.bayesian.likelihood = self.likelihood  # and not one that an earlier run has learnt
        self._risk = self._probe_inputs = self._draw_probe_inputs = None
        self._last_convergence = (0, {})
        self.optimizer = self.optimizer_of_chains = None
        self.create_optimizer()
        shorten_lines(self.callback_handler)
        saves = resume_from_checkpoint or self.args.save_strategy != SaveStrategy.NO
        self._identity = self._identify() if saves else None
        self._announce()
        self._refuse_mixed_documents()
        if resume_from_checkpoint and self._was_complete(resume_from_checkpoint):
            output = TrainOutput(self.state.global_step, 0.0, {})
        else:
            trunk = self.bayesian.members.trunk
            budget = self.args.trunk_memory_gib * 2**30
            trunk.memory = TrunkMemory(budget) if budget else None
            try:
                output = super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                trunk.memory = None
        self._finish()
        return output

    def _was_complete(self, checkpoint: str) -> bool:
        """Whether a checkpoint is the end of this run; it is loaded then: Trainer would make one update more."""
        tensors, saved = checkpoints.load(checkpoint, self._settings(), chains=self.chains)
        if saved["num_updates"] < self._num_steps():
            return False
        self._chains_optimizer.load_chain_tensors(tensors, saved["num_updates"])
        self.state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
        self._say("checkpoint %s is the end of this run: nothing is left to train", checkpoint)
        return True

    def _finish(self) -> None:
        chains = self._chains_optimizer
        if not chains.draws:
            self._warn("training stopped before the first draw: the chains' current states are taken as draws")
            chains.draws = [chains.state_of_chains.theta.detach().cpu().clone()]
        draws = torch.stack(chains.draws, 1)
        approximation, report = self._approximate(draws)
        summary, trace = self._diagnose(draws)
        # an optimiser may well stay where it began, but not leave every plausible place
        judged = self.method.temperature > 0 or any(map(has_strayed, summary["strayed"] or []))
        tell = self._warn if summary["converged"] is False and judged else self._say
        tell("%s: %s", self.method.name, summary["verdict"])
        self._posterior = self._to_posterior(approximation, {**summary, **report}, trace)
        if approximation.num_stored == 1 and self.mesh.chain_size == 1:
            self._warn(
                "the posterior has 1 member: its epistemic uncertainty is 0 and says nothing about the weights. Raise "
                "num_chains or draws_per_chain"
            )
        chains.finished = self._posterior.sample(None, generator(self.args.seed, "members")).to(self.args.device)
        chains.eval()


class BayesianTrainer(BayesianTrainerMixin, Trainer):
    """``transformers.Trainer`` that ends in a posterior; see ``BayesianTrainerMixin``."""


class _LoggedSum(torch.autograd.Function):
    """Sum of losses [m] / divisors [m] to be logged, with the gradient of the plain sum."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, divisors: Tensor) -> Tensor:
        ctx.like = losses
        return (losses / divisors.clamp_min(1)).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return torch.ones_like(ctx.like), None
