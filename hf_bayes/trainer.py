"""A transformers Trainer that ends in a posterior. It knows rules and kernels, and no method by name."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, SchedulerType, Trainer

from hf_bayes import base_model, checkpoints
from hf_bayes.artifact import Posterior
from hf_bayes.batches import ChainBatches, FullPasses, count_terms
from hf_bayes.config import MethodConfig
from hf_bayes.diagnostics import Diagnostics, distance_moved, ess, rhat
from hf_bayes.evaluation import EvaluationMixin
from hf_bayes.likelihood import Categorical
from hf_bayes.methods import build
from hf_bayes.model import BayesianModel, BayesianModelForCausalLM, attach
from hf_bayes.optimizer import ChainOptimizer
from hf_bayes.posterior_config import PosteriorConfig
from hf_bayes.priors import build_prior, lora_prior_ratio
from hf_bayes.rng import generator, seed_of
from hf_bayes.schedules import burn_in_steps, draw_steps
from hf_bayes.starts import initial_members
from hf_bayes.storage import check_writable
from hf_bayes.training_arguments import BayesianTrainingArguments
from hf_bayes.types import Evaluation, Kernel, Problem

logger = logging.getLogger(__name__)

MAX_UNMOVED = 0.01
"""Share of a chain's numbers that an update with noise may leave as they are; by chance it is a few in a million."""

SMALL_PASS_ROWS = 512
"""Rows (members x sequences x positions) up to which members are folded in training without a trunk."""


class BayesianTrainerMixin(EvaluationMixin):
    """Put before any Trainer: ``class BayesianSFTTrainer(BayesianTrainerMixin, SFTTrainer)``.

    Args:
        model: a transformers or peft model; what it makes trainable is random (or ``subspace``).
        method: a config of ``hf_bayes.METHODS``.
        args: ``BayesianTrainingArguments``.
        subspace: see ``hf_bayes.subspace.select``.
    Raises:
        ValueError: before anything runs, for settings under which the method would not sample what it says.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel | PeftModel | BayesianModel,
        method: MethodConfig,
        args: BayesianTrainingArguments,
        *positional: Any,
        subspace: str = "trainable",
        **kwargs: Any,
    ) -> None:
        _refuse_arguments(args, method, model, kwargs)
        check_writable(args.output_dir, overwrite=True)
        self.method, self.subspace = method, subspace
        self.chains = range(method.num_chains)
        with ExitStack() as on_error:  # a model that was refused is given back as it was
            if not isinstance(model, BayesianModel):
                model = attach(model, subspace=subspace, noise_std=args.noise_std)
                on_error.callback(model.detach)
            self.bayesian: BayesianModel = model
            _refuse_frozen_adapter(model)
            self.likelihood = model.likelihood
            self._start = model.theta.detach()[0].clone()
            self._origin = initial_members(model.layout, self._start, method, seed=args.seed, chains=self.chains)
            model.theta.data = self._origin.clone()
            model.members_per_pass = args.members_per_pass
            self.optimizer_of_chains: ChainOptimizer | None = None
            self._posterior: Posterior | None = None
            self._micro, self._terms, self._losses = 0, None, None
            super().__init__(model, args, *positional, **kwargs)
            # Trainer keeps the data set's columns that forward names; ours hands on what the wrapped model takes
            taken = inspect.signature(model.core.forward).parameters
            self._signature_columns = [*taken, *self.label_names, "label", "label_ids"]
            if self.train_dataset is not None:
                self._prepare_data()
            on_error.pop_all()

    # -- the data ------------------------------------------------------------------------------------------------

    def _prepare_data(self) -> None:
        """Count N, and fit accumulation to kernels that see all data in every move."""
        args, dataset = self.args, self.train_dataset
        _require_rows(dataset, args)
        dataset, collate = self._training_data()
        self.num_terms = count_terms(
            dataset,
            collate,
            self.likelihood,
            shift=isinstance(self.bayesian, BayesianModelForCausalLM),
            num_classes=self._num_classes(),
            progress=not args.disable_tqdm,
        )
        natural = len(dataset) if args.data_unit == "sequence" else self.num_terms
        self.num_data = float(args.num_data or natural)
        if self.method.full_batch:
            args.gradient_accumulation_steps = -(-len(dataset) // args.per_device_train_batch_size)
        logger.info("N = %g likelihood terms (%s; %d counted in %d rows)", self.num_data, args.data_unit, self.num_terms, len(dataset))

    def _num_classes(self) -> int | None:
        """What labels must be below; None where they are no classes."""
        if not isinstance(self.likelihood, Categorical):
            return None
        config = self.bayesian.config
        return config.get_text_config().vocab_size if self._is_causal_lm else getattr(config, "num_labels", None)

    def _training_data(self) -> tuple[Any, Callable]:
        """The data set and its collator, without columns that the model does not take: as Trainer leaves them out."""
        if isinstance(self.train_dataset, datasets.Dataset):
            return self._remove_unused_columns(self.train_dataset, description="training"), self.data_collator
        return self.train_dataset, self._get_collator_with_removed_columns(self.data_collator, description="training")

    @property
    def _is_causal_lm(self) -> bool:
        return isinstance(self.bayesian, BayesianModelForCausalLM)

    @property
    def _shared(self) -> bool:
        """Whether all chains see the same rows."""
        return self.args.minibatch == "shared" or self.method.full_batch

    def get_train_dataloader(self) -> DataLoader:
        """Rows by chain: no sampler of Trainer's, and not sharded by accelerate."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        (dataset, collate), args = self._training_data(), self.args
        size = args.per_device_train_batch_size
        batches: ChainBatches | FullPasses
        if self.method.full_batch:
            batches = FullPasses(len(dataset), batch_size=size)
        else:
            batches = ChainBatches(
                len(dataset),
                batch_size=size,
                accumulation=args.gradient_accumulation_steps,
                chains=None if self._shared else self.chains,
                seed=args.seed if args.data_seed is None else args.data_seed,
            )
        return DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        """R: rows of an update, per chain."""
        if self.method.full_batch:
            return len(self.train_dataset)
        return self._train_batch_size * args.gradient_accumulation_steps

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Tensor]:
        """The micro-batches of an update, and the likelihood terms that each chain finds in them."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        groups = 1 if self._shared else len(self.chains)
        terms = sum(self._count(batch["labels"], groups) for batch in batches)
        return batches, torch.as_tensor(terms, device=device).expand(len(self.chains))

    def _count(self, labels: Tensor, groups: int) -> Tensor:
        terms = self.likelihood.is_term(labels[:, 1:] if self._is_causal_lm else labels)
        return terms.reshape(groups, -1).sum(1)

    # -- the chains ----------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The method for this run, on all chains of this process."""
        if self.optimizer is None:
            args, config, bayesian = self.args, self.method, self.bayesian
            steps = self._num_steps()
            burn_in = max(burn_in_steps(config.burn_in, steps), config.warm_start_steps)
            schedule = draw_steps(steps, burn_in=burn_in, draws=config.draws_per_chain, thin=config.thin)
            prior = build_prior(config, bayesian.layout, self._start)
            problem = Problem(self.num_data, prior.to(bayesian.theta), args.learning_rate, steps, burn_in, bayesian.layout.sizes)
            self.prior = prior
            self.optimizer = self.optimizer_of_chains = ChainOptimizer(
                bayesian,
                build(config, problem),
                [generator(args.seed, "chain", chain, device=args.device) for chain in self.chains],
                lr=args.learning_rate,
                draw_steps=schedule,
                chains=self.chains,
                burn_in=burn_in,
                reference_step=config.warm_start_steps,
            )
            rows = len(self.train_dataset)
            per_term = self.num_data / self.num_terms
            self.optimizer_of_chains.scale = rows / self.get_total_train_batch_size(args) * per_term
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Trainer's schedule, looked through to its end.

        Raises:
            ValueError: naming the step at which it leaves [0, learning_rate].
        """
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        for factor in getattr(scheduler, "lr_lambdas", ())[:1]:
            for step in range(num_training_steps):
                if not 0 <= factor(step) <= 1 + 1e-9:
                    raise ValueError(
                        f"lr_scheduler_type={SchedulerType(self.args.lr_scheduler_type).value!r} gives a learning "
                        f"rate of {factor(step) * self.args.learning_rate:g} at step {step + 1}: it must stay within 0 and "
                        f"learning_rate={self.args.learning_rate:g}, the peak that frictions are fixed for. Change "
                        "lr_scheduler_kwargs"
                    )
        return scheduler

    def _num_steps(self) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        updates = -(-len(self.train_dataset) // self.get_total_train_batch_size(self.args))
        return math.ceil(self.args.num_train_epochs * updates)

    def _member_chunks(self, inputs: dict[str, Any]) -> list[slice]:
        """Which members train together: all where a trunk is shared; else as many as keep passes small.

        Long passes are bound by arithmetic, where folding gains little and costs the activations of every member; short
        ones by overhead, which folding divides.
        """
        count = len(self.chains)
        main = next(v for v in inputs.values() if isinstance(v, Tensor))
        rows = main.shape[0] if self._shared else main.shape[0] // count
        if self._shared and self.bayesian.members.num_trunk_blocks > 0:
            size = count
        else:
            size = max(1, SMALL_PASS_ROWS // (rows * (main.shape[1] if main.ndim > 1 else 1)))
        size = self.args.members_per_pass or size
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | None = None) -> Tensor:
        """Forward and backward of a micro-batch, a few members at a time. Returns its share of the mean loss per term."""
        chains = self._chains_optimizer
        self._micro = 0 if chains.begins_update else self._micro + 1
        self._terms = num_items_in_batch
        if isinstance(chains.method, Kernel):
            return self._kernel_step(model, inputs)
        total = torch.zeros((), device=self.args.device)
        for members in self._member_chunks(inputs):
            self._members = members
            self._seed_dropout(members)
            total += super().training_step(model, self._rows_of(inputs, members), num_items_in_batch)
            assert self._leaf.grad is not None
            chains.accumulate(members, self._loss, self._leaf.grad)
            self._leaf = None
        if self.accelerator.sync_gradients:
            self._losses = chains.loss / self._terms.clamp_min(1)
        return total

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Any:
        """In training, minus the summed log-likelihood of the members in turn, per term of the update and chain."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._leaf = self._chains_optimizer.leaf(self._members)
        output = model(**inputs, theta=self._leaf, folded=not self._shared)
        self._loss = output.loss.detach()
        return _LoggedSum.apply(output.loss, self._terms[self._members] * len(self.chains))

    def _rows_of(self, inputs: dict[str, Any], members: slice) -> dict[str, Any]:
        """The rows of a micro-batch that belong to some members; all of them if shared."""
        if self._shared:
            return inputs
        rows = next(v for v in inputs.values() if isinstance(v, Tensor)).shape[0] // len(self.chains)
        cut = slice(members.start * rows, members.stop * rows)
        return {k: v[cut] if isinstance(v, Tensor) and v.ndim else v for k, v in inputs.items()}

    def _seed_dropout(self, members: slice) -> None:
        """Dropout masks are a function of seed, chain, step and micro-batch, so that a resumed run draws the same."""
        if self.bayesian.members.trunk.has_dropout:
            key = (self.args.seed, "dropout", self.chains[members.start], self.state.global_step, self._micro)
            torch.manual_seed(seed_of(*key))

    # -- kernels -------------------------------------------------------------------------------------------------

    def _kernel_step(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Keep the micro-batch; after the last one of the update the kernel may evaluate them as often as it likes."""
        chains = self._chains_optimizer
        self._kernel_batches.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        # exact kernels have no use for dropout: the target would change from one evaluation to the next
        model.eval()
        batches, self._kernel_batches = self._kernel_batches, []
        terms, proposed = self._terms.double().clamp_min(1), torch.empty(0)

        def evaluate(theta: Tensor, *, gradient: bool = True) -> Evaluation:
            nonlocal proposed
            log_lik = torch.zeros(len(theta), dtype=torch.float64, device=theta.device)
            grad = torch.zeros_like(theta) if gradient else None
            for batch in batches:
                for members in self._member_chunks(batch):
                    leaf = theta[members].detach().requires_grad_(gradient)
                    with torch.set_grad_enabled(gradient), self.compute_loss_context_manager():
                        loss = model(**self._rows_of(batch, members), theta=leaf, folded=not self._shared).loss
                        if grad is not None:
                            grad[members] -= torch.autograd.grad(loss.sum(), leaf)[0]
                    log_lik[members] -= loss.detach()
            scale = chains.scale
            proposed = -log_lik / terms
            return Evaluation((scale * log_lik).to(theta.dtype), None if grad is None else grad.mul_(scale))

        stays = chains.move(evaluate)
        # the loss of a chain that refused its proposal is not the proposal's
        self._losses = proposed if self._losses is None else torch.where(stays, self._losses, proposed)
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
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset, got None")
        check_writable(self.args.output_dir, overwrite=True)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = checkpoints.newest_complete(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"no complete checkpoint in {self.args.output_dir}: there is nothing to resume from")
        self._kernel_batches, self._posterior, self._losses = [], None, None
        self.optimizer = self.optimizer_of_chains = None
        self.create_optimizer()
        self._announce()
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        self._finish()
        return output

    def _announce(self) -> None:
        """What is about to run: sizes, scale, prior, memory and time."""
        layout, chains, config = self.bayesian.layout, len(self.chains), self.method
        steps, accumulation = self._num_steps(), self.args.gradient_accumulation_steps
        state = self._chains_optimizer.template_fields()
        matrices = 2 + sum(1 for value in state.values() if value.ndim == 2)  # theta and its gradient beside the state
        size = layout.dim * chains * self.bayesian.theta.element_size()
        logger.info(
            "%s: %d chains x %s random parameters in %d tensors; %.1f MB of chain state, draws %.1f MB",
            config.name, chains, f"{layout.dim:,}", len(layout.names), matrices * size / 2**20,
            config.draws_per_chain * size / 2**20,
        )  # fmt: skip
        seconds = self._time_one_micro_batch()
        logger.info("about %s for %d updates of %d micro-batches", _duration(seconds * steps * accumulation), steps, accumulation)
        ratio = lora_prior_ratio(self.bayesian.model, layout, self.prior)
        if ratio is not None:
            logger.info("the prior's standard deviation of Delta W is %.2g times the base weights' RMS", ratio)
            if ratio > 1:
                logger.warning(
                    "the prior expects LoRA to change weights by %.2g times their RMS: prior_std=%s is wide for this rank and "
                    "alpha; below %.2g the ratio is under 1",
                    ratio, config.prior_std,
                    (config.prior_std if isinstance(config.prior_std, (int, float)) else 1.0) / ratio**0.5,
                )  # fmt: skip
        unmatched = _unmatched_targets(self.bayesian.model)
        if unmatched:
            logger.warning("LoRA target_modules %s match no module of the model: nothing is sampled there", unmatched)
        if config.temperature == 0:
            what = "maximum likelihood" if config.temper == "likelihood" else "the MAP estimate"
            logger.info("temperature 0: this run optimises towards %s, it draws no posterior samples", what)
        if self.bayesian.members.trunk.has_dropout:
            logger.warning("the model has dropout: the chains sample the posterior of the dropout-averaged log-likelihood")

    def _time_one_micro_batch(self) -> float:
        """Seconds of one forward and backward of all chains, on the first rows; nothing is kept of it."""
        batch = self._prepare_inputs(next(iter(self.get_train_dataloader())))
        chunks = self._member_chunks(batch)
        members = chunks[0]
        leaf = self.bayesian.theta[members].detach().requires_grad_()
        self.bayesian.train()
        start = time.perf_counter()
        with self.accelerator.autocast():
            loss = self.bayesian(**self._rows_of(batch, members), theta=leaf, folded=not self._shared).loss
        loss.sum().backward()
        return (time.perf_counter() - start) * len(chunks)

    def _finish(self) -> None:
        chains = self._chains_optimizer
        if not chains.draws:
            logger.warning("training stopped before the first draw: the chains' current states are taken as draws")
            chains.draws = [chains.state_of_chains.theta.detach().cpu().clone()]
        draws = torch.stack(chains.draws, 1)
        approximation = chains.method.finish(chains.state_of_chains, draws)
        self._posterior = self._to_posterior(approximation, self._diagnostics(draws))
        if approximation.num_stored == 1:
            logger.warning(
                "the posterior has 1 member: its epistemic uncertainty is 0 and says nothing about the weights. Raise "
                "num_chains or draws_per_chain"
            )
        chains.finished = self._posterior.sample(None, generator(self.args.seed, "members")).to(self.args.device)
        chains.eval()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Beside Trainer's numbers, what each chain tells: its loss per term and the method's own diagnostics."""
        chains = self.optimizer_of_chains
        if chains is not None and chains.unmoved is not None:
            lost, chains.unmoved = float(chains.unmoved.max()), None
            if self.method.temperature > 0 and lost > MAX_UNMOVED:
                logger.warning(
                    "the first update left %.0f %% of the weights of a chain as they were: it is lost in their "
                    "rounding. Raise learning_rate (%g)",
                    100 * lost, self.args.learning_rate,
                )  # fmt: skip
        if chains is not None and "loss" in logs and self._losses is not None:
            info = {"loss": self._losses, **chains.info, **self._distances()}
            for name, values in info.items():
                for chain, value in zip(self.chains, values.tolist(), strict=True):
                    logs[f"{name}/chain_{chain}"] = value
        super().log(logs, *args, **kwargs)

    def _distances(self) -> dict[str, Tensor]:
        theta = self.bayesian.theta.detach()
        return {"distance_moved": distance_moved(theta, self._origin.to(theta), self.prior.std.to(theta))}

    def _diagnostics(self, draws: Tensor) -> dict[str, Any]:
        """The run's own account of itself.

        Args:
            draws: [M, S, d].
        """
        means = {name: value.tolist() for name, value in self._chains_optimizer.mean_info().items()}
        laws = means.get("kinetic_temperature_law")
        moves = max(1, self._chains_optimizer.num_updates - self._chains_optimizer.burn_in)
        values = self._probe(draws)
        enough = draws.shape[1] >= 4 and draws.shape[0] >= 2
        diagnostics = Diagnostics(
            dim=self.bayesian.layout.dim,
            distance=self._distances()["distance_moved"].tolist(),
            kinetic_temperature=means.get("kinetic_temperature"),
            kinetic_temperature_law=None if laws is None else sum(laws) / len(laws),
            acceptance=means.get("acceptance"),
            divergences=None if "divergent" not in means else [round(rate * moves) for rate in means["divergent"]],
            num_moves=moves if "acceptance" in means else None,
            rhat=float(rhat(values).max()) if enough else None,
            ess=float(ess(values).min()) if enough else None,
        )
        summary = diagnostics.summary()
        verdict = summary["verdict"]
        unknown = verdict.startswith("convergence not")  # nothing else is wrong, and too few draws to say more
        return {**summary, "converged": None if unknown else verdict == "converged"}

    @torch.no_grad()
    def _probe(self, draws: Tensor) -> Tensor:
        """[M, S, 1]: log-likelihood of some rows under every draw, a function of theta that no symmetry of LoRA blurs."""
        dataset, collate = self._training_data()
        count = min(len(dataset), self.args.per_device_train_batch_size)
        batch = self._prepare_inputs(collate([dataset[row] for row in range(count)]))
        self.bayesian.eval()
        values = []
        for theta in draws.flatten(0, 1):
            with self.accelerator.autocast():
                loss = self.bayesian(**batch, theta=theta[None].to(self.args.device), folded=False).loss
            values.append(-loss.double().cpu())
        return torch.cat(values).view(*draws.shape[:2], 1)

    # -- saving --------------------------------------------------------------------------------------------------

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
        """Write the posterior directory (checkpoints have files of their own), with held-out metrics if there is an eval_dataset."""
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
                task="causal_lm" if self._is_causal_lm else "sequence_classification",
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


_KEPT_METRICS = ("nll", "accuracy", "ece", "brier", "total", "aleatoric", "epistemic", "member_nll", "perplexity")


def _refuse_arguments(args: Any, method: Any, model: Any, kwargs: dict[str, Any]) -> None:
    """Everything that would quietly change the law being sampled, or that this trainer cannot honour."""
    if not isinstance(args, BayesianTrainingArguments):
        raise ValueError(f"args must be BayesianTrainingArguments, got {type(args).__name__}: its defaults suit samplers")
    if not isinstance(method, MethodConfig):
        raise ValueError(f"method must be a config such as SGHMCConfig(...), got {type(method).__name__}")
    if not isinstance(model, (PreTrainedModel, PeftModel, BayesianModel)):
        raise ValueError(f"model must be a transformers or peft model, got {type(model).__name__}")
    if args.max_grad_norm:
        raise ValueError(
            f"{method.name} needs max_grad_norm=0 (got {args.max_grad_norm}): clipped gradients change the stationary "
            "distribution. Set max_grad_norm=0"
        )
    if args.weight_decay:
        raise ValueError(
            f"{method.name} needs weight_decay=0 (got {args.weight_decay}): the prior is part of the method and would be "
            "counted twice. Set prior_std in the method's config (weight decay w on the mean loss is prior_std = 1/sqrt(N w))"
        )
    if args.n_gpu > 1:
        raise ValueError("nn.DataParallel is refused: it would average chains. Use accelerate launch, or CUDA_VISIBLE_DEVICES=0")
    if args.deepspeed or args.fsdp:
        raise ValueError("DeepSpeed and FSDP shard the parameters that are sampled and are not supported: leave them off")
    if args.load_best_model_at_end:
        raise ValueError("load_best_model_at_end is refused: a posterior is all of its draws, not the best checkpoint of a run")
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size is refused: rows per update are part of the chain. Set per_device_train_batch_size")
    if args.push_to_hub and args.hub_strategy != "end":
        raise ValueError(f"hub_strategy={args.hub_strategy!r} would push unfinished posteriors: use hub_strategy='end'")
    if args.label_smoothing_factor:
        raise ValueError("label_smoothing_factor must be 0: a smoothed loss is no log-likelihood")
    if args.neftune_noise_alpha:
        raise ValueError("neftune_noise_alpha must be unset: noise on embeddings changes the likelihood that is sampled")
    if kwargs.get("train_dataset") is not None:
        _require_rows(kwargs["train_dataset"], args)
    for name in ("optimizers", "optimizer_cls_and_kwargs", "model_init", "compute_loss_func"):
        if kwargs.get(name) not in (None, (None, None)):
            raise ValueError(f"{name} is refused: the method is the optimizer, and the likelihood is the model's own")


def _require_rows(dataset: Any, args: BayesianTrainingArguments) -> None:
    """Chains draw permutations of rows that can be counted and asked for by number."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"train_dataset ({type(dataset).__name__}) has no length: "
            + ("cannot infer N without num_data=, and " if args.num_data is None else "")
            + "chains draw their own permutations of a sized data set. Materialise it (e.g. datasets.Dataset.from_list)"
        )
    if len(dataset) == 0:
        raise ValueError("train_dataset has 0 rows; N is needed to scale the likelihood: give it data")


def _refuse_frozen_adapter(model: BayesianModel) -> None:
    """What is saved of an adapter are its random tensors: one that is frozen and not its base's would be lost."""
    if not isinstance(model.model, PeftModel):
        return
    name = model.model.active_adapter
    own = [n for n, _ in model.model.named_parameters() if ".lora_" in n or ".modules_to_save." in n]
    frozen = [n for n in own if f".{name}." in f"{n}." and n not in model.layout.names]
    if frozen:
        raise ValueError(
            f"{len(frozen)} tensors of the adapter are not random, first {frozen[0]}: their values would not be saved "
            "with the posterior. Sample the whole adapter (subspace='trainable'), or merge it first (merge_and_unload)"
        )


def _unmatched_targets(model: nn.Module) -> list[str]:
    """LoRA targets that name no module of the model: peft says nothing as long as another one does."""
    config = model.peft_config[model.active_adapter] if isinstance(model, PeftModel) else None
    targets = getattr(config, "target_modules", None)
    if not isinstance(targets, (set, list, tuple)):
        return []
    names = [name for name, _ in model.named_modules()]
    return sorted(t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
