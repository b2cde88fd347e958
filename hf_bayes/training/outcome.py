"""The outcome of a run: its posterior, the evaluation on held-out rows, and the save of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi

from hf_bayes.diagnostics.plausibility import is_implausible
from hf_bayes.distributions.approximations import Draws
from hf_bayes.models.calibrating import predicting_as_loaded
from hf_bayes.models.to_posterior import sidecars_of, to_posterior
from hf_bayes.posteriors import storage
from hf_bayes.posteriors.model_card import CardFields, author_fields, write_card
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.prediction_fits import with_temperature
from hf_bayes.posteriors.sidecars import Sidecars
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.calibrating import calibrate, report_length
from hf_bayes.training.checks.rows import refuse_overwritten_prior
from hf_bayes.training.diagnosis import Diagnosis
from hf_bayes.training.evaluation import Evaluator
from hf_bayes.training.heldout_metrics import HeldOutEvaluation, heldout_evaluation, with_heldout_metrics
from hf_bayes.training.reports.own_choices import report_departure
from hf_bayes.training.session import required
from hf_bayes.training.setup import Setup
from hf_bayes.training.trainer_host import TrainerHost

NO_POSTERIOR = "there is no posterior yet: call train() first"


class Outcome:
    """The posterior of a trainer's last run, with its held-out evaluation and the author's fields of its card.

    Attributes:
        evaluator: the evaluator of the trainer.
        posterior: the posterior; with several processes, the draws of this process's chains. None before the end of
            a run.
        sidecars: the files of tokenizer or processor. They are collected before the first step, because that writes
            to the disk: if the disk is full, no finished run is lost.
        heldout: the held-out evaluation; None before the posterior was evaluated.
        card: the fields of the model card that only the author can fill in.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.evaluator = Evaluator(setup)
        self.sidecars = Sidecars()
        self.card: CardFields | None = None
        self.posterior: Posterior | None = None
        self.heldout: HeldOutEvaluation | None = None

    def begin(self, active: ActiveRun) -> None:
        """Forget an earlier run."""
        self.posterior = self.heldout = None
        self.sidecars = sidecars_of(active.setup.model, active.host.tokenizer)

    def finish(self, active: ActiveRun, diagnosis: Diagnosis) -> None:
        """Make the posterior of a finished run, report its verdict, and let predictions use its members."""
        setup, host = active.setup, active.host
        _report_stop(active)
        if not active.run.draws:
            active.run.take_draw()
        finished = active.finish()
        summary, trace = diagnosis.summary(finished.approximation)
        # an optimiser may well stay where it began, but not leave every plausible place
        judged = active.method.temperature > 0 or any(map(is_implausible, summary["prior_loss_ratio"] or []))
        if summary["converged"] is False and judged:
            text = "%s: checks of the chains that failed, the most serious first: %s"
            host.warn(text, active.method.name, summary["verdict"])
        else:
            host.say("%s: %s", active.method.name, summary["verdict"])
        approximation = finished.approximation
        if isinstance(approximation, Draws):
            approximation = dataclasses.replace(approximation, theta=active.with_statistics(approximation.theta))
        posterior = self.posterior = to_posterior(
            setup.model,
            approximation,
            active.method,
            subspace=setup.subspace,
            num_data=active.rows.num_data,
            data_unit=host.args.data_unit,
            tokenizer=host.tokenizer,
            seed=host.args.seed,
            diagnostics={**summary, **finished.report},
            trace=trace,
            prior=None if setup.inherited is None else setup.inherited.record,
            sidecars=sidecars_of(setup.model, None, self.sidecars),
        )
        if finished.approximation.num_stored == 1 and setup.mesh.chain_size == 1:
            host.warn(
                "the posterior has 1 member: its epistemic uncertainty is 0 and says nothing about the weights. Raise "
                "num_chains or draws_per_chain"
            )
        setup.model.show(posterior.members().to(host.args.device), finished.member_group)
        self.posterior = _calibrated(posterior, active)  # set above, too: an error here must not lose the posterior

    def predicting(self) -> AbstractContextManager[None]:
        """Return the context in which the trainer's model predicts as one that is loaded from the posterior."""
        posterior = self.posterior
        if posterior is None or posterior.config.prediction == "members":  # they are shown already
            return nullcontext()
        return predicting_as_loaded(self._setup.model, posterior)

    def keep_evaluation(self, metrics: dict[str, float]) -> None:
        """Store an evaluation of the posterior on the trainer's own eval_dataset, for the next save.

        Args:
            metrics: the metrics that ``evaluate`` has returned.
        """
        self.heldout = heldout_evaluation(required(self.posterior, NO_POSTERIOR), self.evaluator, metrics)

    # -- saving ----------------------------------------------------------------------------------------------------

    def save(self, active: ActiveRun | None, directory: str) -> None:
        """Write the posterior directory in one step, with held-out metrics if there is an eval_dataset.

        The directory has the current tokenizer and generation config. Every process calls this method and writes the
        members of its chains.

        Raises:
            ValueError: before a run has ended, or if the directory is that of the posterior which is the prior.
        """
        refuse_overwritten_prior(self._setup.inherited, directory)
        posterior, active = required(self.posterior, NO_POSTERIOR), required(active)
        host, mesh = active.host, active.setup.mesh
        if host.eval_dataset is not None and not posterior.config.metrics:
            try:
                posterior = self.posterior = self._evaluated(posterior, active)
            except Exception as error:  # the draws are worth more than their figures
                if mesh.num_processes > 1:  # the others may wait in the evaluation for this process
                    raise
                host.warn("the posterior is saved without its metrics, because its evaluation failed: %s", error)
        sidecars = sidecars_of(active.setup.model, host.tokenizer)
        if sidecars != posterior.sidecars:  # a new posterior checks and hashes all of its draws
            posterior = self.posterior = dataclasses.replace(posterior, sidecars=sidecars)
        first, card = mesh.data_rank == 0, self.card or CardFields()
        posterior.save_pretrained(directory, repo_id=host.args.hub_model_id, group=mesh, contributes=first, **card)

    def _evaluated(self, posterior: Posterior, active: ActiveRun) -> Posterior:
        """Return the posterior with its held-out metrics. Evaluate it first if that was not done after the run."""
        if self.heldout is None:
            with self.predicting():
                self.keep_evaluation(active.host.measure("eval"))
        assert self.heldout is not None
        return with_heldout_metrics(posterior, active, self.evaluator, self.heldout)

    def push(
        self,
        host: TrainerHost,
        save: Callable[[], None],
        *,
        blocking: bool,
        private: bool | None = None,
        commit_message: str | None = None,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save, and upload the posterior's own files: never training_args.bin, checkpoints or tokens.

        Args:
            host: the trainer.
            save: a function that writes the posterior; every process calls it.
            blocking: False returns at once, while the upload goes on.
            private: True makes a new repository private (``args.hub_private_repo`` by default).
            commit_message: the message of the commit; None takes the usual one.
            token: an access token of the Hub (``args.hub_token`` by default).
            revision: a branch, made if it is not there, or a pull request such as refs/pr/1 (``args.hub_revision`` by
                default).
            card: fields of the model card: license, language, datasets (or dataset_tags), tags and model_name.
        Returns:
            The commit, a text with its address, or its future if not blocking; None in all processes but the first.
        """
        self.card = author_fields(self.card, card)
        save()
        if not host.is_first_process:
            return None
        args, whole = host.args, self._setup.mesh.chain_size == 1
        posterior = required(self.posterior, NO_POSTERIOR) if whole else Posterior.from_pretrained(host.directory)
        push = partial(
            posterior.push_to_hub,
            args.hub_model_id or Path(host.directory).absolute().name,
            token=args.hub_token if token is None else token,
            private=args.hub_private_repo if private is None else private,
            revision=args.hub_revision if revision is None else revision,
            commit_message=commit_message,
            **self.card,
        )
        return push() if blocking else HfApi().run_as_future(push)

    def write_card(self, host: TrainerHost, fields: dict[str, Any]) -> None:
        """Keep the author's fields of the card; write the card anew if a posterior is saved.

        A run that has not ended has no posterior and gets no card; TRL asks for one at every checkpoint.
        """
        self.card, args = author_fields(self.card, fields), host.args
        if args.should_save and (Path(host.directory) / storage.MANIFEST).exists():
            write_card(host.directory, repo_id=args.hub_model_id, **self.card)


def _calibrated(posterior: Posterior, active: ActiveRun) -> Posterior:
    """Return the posterior with the temperature of its mixture, if one can be fitted; predictions use it, too."""
    model = active.setup.model
    with predicting_as_loaded(model, posterior):
        found = calibrate(active)
    if found is None:
        return posterior
    active.host.say(found.describe())
    report_length(active.method, found, active.host)
    report_departure(active.method.name, posterior.config.diagnostics, found.nll, active.host)
    calibrated = with_temperature(posterior, found.to_dict())
    if found.prediction == "members":
        model.show(model.current, model.member_group, found.temperature)
    return calibrated


def _report_stop(active: ActiveRun) -> None:
    """Say where a run was stopped before its end. For a sampler without a draw this is a warning."""
    host, run, problem = active.host, active.run, active.problem
    if run.num_updates >= problem.num_steps:
        return
    if run.num_sampled:
        host.say(
            "training stopped at update %d of %d, after %d of %d draws of each chain",
            run.num_updates, problem.num_steps, run.num_sampled, len(problem.draw_steps),
        )  # fmt: skip
        return
    if active.method.requirements.ends_in_gaussian:
        host.say(
            "training stopped at update %d of %d, and the Gaussian is fitted there", run.num_updates, problem.num_steps
        )
        return
    tell = host.warn if active.method.temperature > 0 else host.say
    tell(
        "training stopped at update %d of %d, before the first draw: the last states of the chains take its place",
        run.num_updates, problem.num_steps,
    )  # fmt: skip
