"""The run of one call of ``train``: its method, its objective, its chains and their observations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import SchedulerType

from hf_bayes.chains.own_settings import settled
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Approximation, FinalPassResult, Problem
from hf_bayes.distributions.approximations import Draws, Gaussian, joined
from hf_bayes.distributions.covariance import moved
from hf_bayes.distributions.energy import IndependentPrior
from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.members.trunk import TrunkMemory
from hf_bayes.methods.assembly import mirrors_chains
from hf_bayes.models.statistics import with_batch_norm_statistics
from hf_bayes.objectives.data_access import DataAccess
from hf_bayes.objectives.probe import LEAST_ROWS, Probe
from hf_bayes.objectives.range_test import usual_rate
from hf_bayes.objectives.starting import start_run
from hf_bayes.posteriors.tasks import TASKS
from hf_bayes.training.adamw_estimate import adamw_estimate
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.data.heldout_rows import HeldOutData
from hf_bayes.training.data.rows import TrainingRows
from hf_bayes.training.data.varying import rows_vary
from hf_bayes.training.label_noise import LabelNoise, needs_pilot, pilot_updates
from hf_bayes.training.reports.monitor import Monitor
from hf_bayes.training.reports.own_choices import has_choices, report_ladder, report_step_size
from hf_bayes.training.setup import Setup
from hf_bayes.training.trainer_host import TrainerHost
from hf_bayes.uncertainty.likelihoods import Likelihood, Normal

MOST_ROWS_OF_STATISTICS = 2**13
"""The largest number of training rows from which the statistics of batch normalisation are estimated."""


class Finished(NamedTuple):
    """The result of a run.

    Attributes:
        approximation: draws of the chains of this process. Any other approximation is complete in every process.
        report: {name: JSON-ready values}, the method's own diagnostics (``FinalPassResult``).
        member_group: the processes that hold the other members.
    """

    approximation: Approximation
    report: dict[str, Any]
    member_group: LocalMembers


class ActiveRun:
    """One call of ``train``: the chains of this process, their objective, and their observations.

    Args:
        host: the trainer.
        setup: its settings that do not change.
        rows: its training rows.
        found_rate: the learning rate that the run has found before it was interrupted; None finds one if none is given.
        noise_std: the noise of a regression that the run has learnt before it was interrupted; None measures it.
        number: the number of the run on this trainer, from 0; None takes the next one.
    Attributes:
        settings: the method that the run began with, and the settings that the run chose by itself.
        result: the result of the method, with the approximation and the report of ``Finished``; None before the end.
        problem, prior: the problem and the prior that the method was built for.
        objective: the log-likelihood of the model on the training rows.
        run: the chains.
        monitor: the observations of the chains.
        rows_vary: rows of the training data differ each time they are read. For an optimiser this is not known.
        mirrored: every second chain takes minus the noise of the chain before it.
        noise: the noise of a regression, if it is learnt; otherwise None.
    """

    def __init__(
        self,
        host: TrainerHost,
        setup: Setup,
        rows: TrainingRows,
        *,
        found_rate: float | None = None,
        noise_std: float | None = None,
        number: int | None = None,
    ) -> None:
        self.host, self.setup, self.rows = host, setup, rows
        rows.run_number = rows.num_runs if number is None else number
        self.result: FinalPassResult | None = None
        model = setup.model
        self._pending: list[Any] = []  # micro-batches of the update that has begun
        model.members.context.batch_statistics = True  # also in evaluations during the run
        model.likelihood = setup.likelihood  # and not one that an earlier run has learnt
        self.noise: LabelNoise | None = None
        if setup.learns_noise:
            with model.showing(model.theta.detach(), setup.member_group):
                self.noise = LabelNoise(host, model, noise_std)
        samples = rows.method.temperature > 0
        self.rows_vary = samples and rows.stream is None and rows_vary(*rows.data(), seed=host.args.seed)
        self._start(found_rate)
        if self.noise is not None and noise_std is None and needs_pilot(self.method):
            self._measure_noise_near_mode(self.noise)

    def _start(self, found_rate: float | None) -> None:
        """Make the chains, with noise and rows of this run."""
        host, setup, rows = self.host, self.setup, self.rows
        args, model = host.args, setup.model
        self.run, self.objective, self.prior, self.settings = start_run(
            model,
            rows.method,
            rows.scale,
            num_steps=rows.num_steps,
            learning_rate=args.learning_rate,
            seed=rows.seed_of_run(args.seed),
            start=setup.start,
            theta=model.theta.detach().to(args.device, copy=True),
            inherited=None if setup.inherited is None else setup.inherited.gaussian,
            mesh=setup.mesh,
            most_terms=rows.most_terms,
            batch_fraction=rows.batch_fraction,
            shared=rows.shared,
            members_per_pass=args.members_per_pass,
            private=rows.private,
            context=host.autocast,
            prepare=host.prepare,
            data=self._data_access(),
            trial_updates=rows.shared_updates,
            found_rate=found_rate,
            falls=SchedulerType(args.lr_scheduler_type) == SchedulerType.CONSTANT,
            progress=not args.disable_tqdm and host.is_first_process,
        )
        self.problem = self.run.problem
        self.mirrored = mirrors_chains(self.method, self.problem)
        copies = len(self.run.chains) if rows.shared else 1
        passes = copies * self.method.requirements.gradients_per_update
        self._ops_per_entry = 6 * float(passes) * model.core.num_parameters(exclude_embeddings=True)
        self.probe_of_draws = self._probe(self.problem.num_steps // self.method.draws_per_chain)
        self.monitor = Monitor(
            model.layout.sizes,
            self.problem,
            self.run.theta,
            warm_start=self.method.num_warm_start_steps,
            probe=self._probe(args.probe_steps or BayesianTrainingArguments.probe_steps),
            probe_steps=args.probe_steps,
        )
        self.show_chains()

    def _measure_noise_near_mode(self, noise: LabelNoise) -> None:
        """Measure the noise of a regression at a short MAP estimate. If this diverges, the noise stays as it is."""
        steps = self.problem.num_steps
        count = pilot_updates(self.method, steps)
        found = self.settings.found_rate  # of a run of all updates: a shorter one needs a larger rate
        rate = usual_rate(count) if found is None else found * math.sqrt(steps / count)
        try:
            mode = adamw_estimate(
                self.host, self.setup, self.rows, self.method, self.setup.start[None], self.problem,
                learning_rate=rate, num_updates=count, title="noise of the labels",
            )  # fmt: skip
        except FloatingPointError as error:
            self.host.warn("noise_std stays at %.3g, because a short MAP estimate diverged: %s", noise.of_run, error)
            return
        with self.setup.model.showing(mode):
            noise.measure()

    @property
    def number(self) -> int:
        """The number of the run on this trainer, from 0."""
        return self.rows.run_number

    @property
    def method(self) -> MethodConfig:
        """The config for batches of this size, with numbers in place of what was left open.

        After the run it also has what the run has found, such as a temperature.
        """
        return self.settings.method if self.result is None else settled(self.settings.method, self.result)

    @property
    def was_fitted(self) -> bool:
        """True if the finished run has found fields of its method: its result has another energy than its updates."""
        return self.result is not None and bool(self.result.fields)

    def _data_access(self) -> DataAccess | None:
        """Return rows by number, for passes over the data: of a method, or of the diagnostics at the end."""
        host, needs = self.host, self.rows.requirements
        if self.rows.stream is not None:
            return None
        access = DataAccess(self.rows.by_number, len(host.train_dataset), varies=self.rows_vary)
        if needs.heldout == "none":
            return access
        heldout, most = HeldOutData(host), needs.most_rows(TASKS[self.setup.model.task].unit)
        access = access.with_heldout(heldout.by_number, len(heldout.rows), most=most, seed=host.args.seed)
        return access._replace(hide=host.args.disable_tqdm or not host.is_first_process)

    def _probe(self, interval: int) -> Probe:
        """Return a probe whose forwards cost at most a fiftieth of ``interval`` updates."""
        most = max(LEAST_ROWS, interval * self.rows.scale.rows_per_update // 50)
        choose = partial(self.rows.first_terms, most_rows=most)
        seed, likelihood = self.host.args.seed, lambda: self.likelihood
        return Probe(self.objective, choose, self.setup.start, seed=seed, likelihood=likelihood)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood that the chains sample with. At the end, the model's may be one that was fitted."""
        return self.setup.likelihood if self.noise is None else self.noise.likelihood

    @property
    def chosen_prior(self) -> IndependentPrior | Gaussian:
        """The prior of the run. After a ladder, it is the prior of the rung that was chosen."""
        if not self.was_fitted or not isinstance(self.prior, IndependentPrior):
            return self.prior
        return self.prior.scaled(self.method.prior_scale / self.settings.method.prior_scale)

    @property
    def energy(self) -> Problem:
        """The problem, with ``chosen_prior``."""
        return self.problem._replace(prior=self.chosen_prior.to(self.run.theta))

    @property
    def adamw_learning_rate(self) -> float | None:
        """The peak learning rate of AdamW: of a warm start, or of an optimiser; None where there is no AdamW."""
        if self.method.num_warm_start_steps:
            return self.method.adamw_learning_rate
        return self.problem.learning_rate if self.method.requirements.learning_rate == "range_test" else None

    # -- updates ---------------------------------------------------------------------------------------------------

    def take(self, batch: Any, learning_rate: float, *, is_last: bool) -> Tensor:
        """Collect a micro-batch. After the last one of an update, advance the chains, and observe the update.

        Returns:
            The mean loss of a term, over the chains of this process; 0 before the last micro-batch.
        """
        self._pending.append(batch)
        if not is_last:
            return torch.zeros((), device=self.host.args.device)
        batches, self._pending = self._pending, []
        if self.noise is not None and 0 < self.run.num_updates == self.method.num_warm_start_steps:
            self.noise.measure()
        record = self.run.update(batches, learning_rate)
        self.monitor.observe(record)
        if has_choices(record, self.problem):
            record = record._replace(info=self.of_all_chains(record.info))
            report_step_size(record, self.method, self.problem, self.rows.updates_of_epoch, self.host)
        self.show_chains()
        self.host.empty_device_cache()
        assert record.loss is not None
        return record.loss.mean().float()

    def of_all_chains(self, info: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return name -> [K] for all chains, given name -> [M] for the chains of this process.

        All processes call this together, with the same names.
        """
        if not info:
            return info
        columns = torch.stack([value.double().to(self.host.args.device) for value in info.values()], 1)
        return dict(zip(info, self.setup.mesh.gather_chains(columns).unbind(1), strict=True))

    @contextmanager
    def trunk_memory(self) -> Iterator[None]:
        """Store, until the end of the block, the trunk's outputs for rows that come again in every epoch.

        Warn if there is nothing to store.
        """
        trunk, budget = self.setup.model.members.trunk, self.host.args.trunk_memory_gib * 2**30
        if budget and (reason := self._reason_without_memory()) is not None:
            self.host.warn("trunk_memory_gib=%g stores nothing: %s", self.host.args.trunk_memory_gib, reason)
        trunk.memory = TrunkMemory(budget) if budget else None
        try:
            yield
        finally:
            trunk.memory = None

    def _reason_without_memory(self) -> str | None:
        """Return the reason why no output of the trunk can be used again; None if it can."""
        trunk = self.setup.model.members.trunk
        if trunk.num_blocks == 0:
            return "no layers run before all random parameters, or the model is of a kind without a trunk. Leave it out"
        if self.objective.passes.dropout and trunk.has_dropout:
            return "dropout changes the outputs of a row in every pass. Set the model's dropout (and LoRA's) to 0"
        return None

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return Trainer's estimate for a micro-batch: each member runs the wrapped model once for each gradient."""
        main_input = inputs.get(getattr(self.setup.model, "main_input_name", "input_ids"))
        return 0 if main_input is None else int(self._ops_per_entry * main_input.numel())

    def show_chains(self) -> None:
        """Let evaluation and generation use the current states of the chains."""
        self.setup.model.show(self.run.theta.detach(), self.setup.member_group)

    def with_batch_norm_statistics(self, theta: Tensor) -> Tensor:
        """Return members with the statistics of their batch normalisation, from rows of the training data."""
        if not self.setup.model.members.batch_norms:
            return theta
        count, size = len(self.host.train_dataset), self.host.args.per_device_train_batch_size
        order = torch.randperm(count, generator=generator(self.host.args.seed, "rows of statistics")).tolist()
        most = min(count, MOST_ROWS_OF_STATISTICS)
        rows = order[: max(size, most // size * size)]  # a short batch has less exact statistics
        batches = self.rows.by_number(rows)
        return with_batch_norm_statistics(self.setup.model, theta, batches, self.host.evaluation_autocast)

    def finish(self) -> Finished:
        """Return the result of the method, and leave the last states of the chains in the model."""
        self.setup.model.place(self.run.theta)  # where the next run starts
        self.rows.num_runs = max(self.rows.num_runs, self.number + 1)
        mesh, passes = self.setup.mesh, self.run.method.final_pass is not None
        needs = self.method.requirements
        if self.noise is not None and needs.final_pass and not needs.fits_noise:
            self.noise.measure()  # a Gaussian is fitted at the modes where the chains are
        # such a method makes its last pass for the chains of this process; processes that share them find the same
        by_process = passes and not needs.all_chains_in_one_pass
        try:
            found = self.run.finish(None if by_process else mesh.gather_chains)
        finally:
            self.objective.close()
        if isinstance(found.approximation, Draws) and not passes:
            self.result = found
            return Finished(found.approximation, {}, self.setup.member_group)
        parts: list[Any] = mesh.exchange(found) if by_process else [found]
        if parts[0].noise_std is not None:
            self.setup.model.likelihood = Normal(parts[0].noise_std)
        names = parts[0].report
        report = {name: [value for part in parts for value in part.report[name]] for name in names}
        report_ladder(self.method.name, parts[0], self.host, sampled=self.run.num_sampled > 0)
        # on the CPU, as draws are, whatever device the chains are on
        approximations = [moved(part.approximation, "cpu") for part in parts]
        whole = approximations[0] if len(parts) == 1 else joined(approximations)
        self.result = parts[0]._replace(approximation=whole, report=report)
        return Finished(whole, report, LocalMembers())
