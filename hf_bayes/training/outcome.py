"""The outcome of a run: its posterior, and the evaluation of it on held-out rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from hf_bayes.diagnostics.plausibility import is_implausible
from hf_bayes.distributions.approximations import Draws
from hf_bayes.models.calibrating import predicting_as_loaded
from hf_bayes.models.prediction_state import PredictionState
from hf_bayes.models.to_posterior import sidecars_of, to_posterior
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.prediction_fits import with_temperature
from hf_bayes.posteriors.sidecars import Sidecars
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.calibrating import calibrate, most_rows, report_length
from hf_bayes.training.diagnosis import Diagnosis
from hf_bayes.training.evaluation import Evaluator
from hf_bayes.training.heldout_metrics import HeldOutEvaluation, heldout_evaluation, with_heldout_metrics
from hf_bayes.training.reports.own_choices import report_departure
from hf_bayes.training.session import required
from hf_bayes.training.setup import Setup
from hf_bayes.uncertainty.likelihoods import Normal

NO_POSTERIOR = "there is no posterior yet: call train() first"


class Outcome:
    """The posterior of a trainer's last run, with its held-out evaluation.

    Attributes:
        setup: the settings of the trainer.
        evaluator: the evaluator of the trainer.
        posterior: the posterior; with several processes, the draws of this process's chains. None before the end of
            a run.
        sidecars: the files of tokenizer or processor. They are collected before the first step, because that writes
            to the disk: if the disk is full, no finished run is lost.
        heldout: the held-out evaluation; None before the posterior was evaluated.
        finished: the members and the way of prediction at the end of the run; None before that. They stay on the
            device of the run as long as the trainer lives.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.evaluator = Evaluator(setup)
        self.sidecars = Sidecars()
        self.posterior: Posterior | None = None
        self.heldout: HeldOutEvaluation | None = None
        self.finished: PredictionState | None = None

    def begin(self, active: ActiveRun) -> None:
        """Forget an earlier run."""
        self.posterior = self.heldout = self.finished = None
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
            theta = active.with_batch_norm_statistics(approximation.theta)
            approximation = dataclasses.replace(approximation, theta=theta)
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
        # set above, too: an error here must not lose the posterior
        posterior = self.posterior = _with_learnt_noise(posterior, active)
        self.posterior = _calibrated(posterior, active)
        self.finished = PredictionState(setup.model)

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """Let the trainer's model predict as one that is loaded from the posterior, until the end of the block."""
        posterior = self.posterior
        with self._as_finished():
            if posterior is None or posterior.config.prediction == "members":  # they are shown already
                yield
                return
            with predicting_as_loaded(self.setup.model, posterior):
                yield

    @contextmanager
    def _as_finished(self) -> Iterator[None]:
        """Let the model predict as at the end of the run, until the end of the block; before a run, as it does now.

        Another trainer may have trained the same model since, or ``show`` may have given it other members.
        """
        if self.finished is None:
            yield
            return
        model = self.setup.model
        now, members_per_pass = PredictionState(model), model.members_per_pass
        try:
            self.finished.restore()
            model.members_per_pass = members_per_pass  # it changes memory alone, and may be set at any time
            yield
        finally:
            now.restore()

    def keep_evaluation(self) -> None:
        """Store the evaluation of the posterior on the trainer's own eval_dataset that has just ended, for a save.

        The metrics that ``evaluate`` has returned are not used: ``compute_metrics`` may have put other numbers under
        the names of the posterior's own.
        """
        self.heldout = heldout_evaluation(required(self.posterior, NO_POSTERIOR), self.evaluator)

    def to_save(self, active: ActiveRun | None) -> Posterior:
        """Return the posterior with held-out metrics, if there is an eval_dataset, and the current tokenizer.

        Every process calls this method, because the evaluation may be shared.

        Raises:
            ValueError: before a run has ended.
        """
        posterior, active = required(self.posterior, NO_POSTERIOR), required(active)
        host = active.host
        if host.eval_dataset is not None and not posterior.config.metrics:
            try:
                posterior = self.posterior = self._evaluated(posterior, active)
            except Exception as error:  # the draws are worth more than their figures
                if active.setup.mesh.num_processes > 1:  # the others may wait in the evaluation for this process
                    raise
                host.warn("the posterior is saved without its metrics, because its evaluation failed: %s", error)
        sidecars = sidecars_of(active.setup.model, host.tokenizer)
        if sidecars != posterior.sidecars:  # a new posterior checks and hashes all of its draws
            posterior = self.posterior = dataclasses.replace(posterior, sidecars=sidecars)
        return posterior

    def _evaluated(self, posterior: Posterior, active: ActiveRun) -> Posterior:
        """Return the posterior with its held-out metrics. Evaluate it first if that was not done after the run."""
        with self._as_finished():
            if self.heldout is None:
                with self.predicting():
                    active.host.measure("eval")
                    self.keep_evaluation()
            assert self.heldout is not None
            return with_heldout_metrics(posterior, active, self.evaluator, self.heldout)


def _with_learnt_noise(posterior: Posterior, active: ActiveRun) -> Posterior:
    """Return the posterior with the noise of a regression that fits its predictions, if no noise was given."""
    if active.noise is None or active.method.requirements.fits_noise:
        return posterior
    with predicting_as_loaded(active.setup.model, posterior):
        found = active.noise.best_fit(most_rows(active))
    if found is None:
        return posterior
    active.setup.model.likelihood = Normal(found.noise_std)
    active.host.say(found.describe())
    config = posterior.config
    diagnostics = {**config.diagnostics, "noise_std_of_run": found.of_run}
    changed = dataclasses.replace(config, head={**config.head, "noise_std": found.noise_std}, diagnostics=diagnostics)
    return dataclasses.replace(posterior, config=changed)


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
