"""``tune``: compare methods within a budget of gradients, and keep the posterior of the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from tqdm import tqdm

from hf_bayes.core.number_checks import is_count
from hf_bayes.methods.registry import METHODS
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.data_rows import is_stream, require_dataset
from hf_bayes.posteriors.hub import make_repository
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.data.generators import undisturbed
from hf_bayes.training.repeated_runs import prepared_run, require_repeatable
from hf_bayes.training.tuning import chance
from hf_bayes.training.tuning.arguments import check_arguments, repository
from hf_bayes.training.tuning.candidates import Candidate, default_candidates
from hf_bayes.training.tuning.choice import as_table, best_of, sentence
from hf_bayes.training.tuning.figure import draw
from hf_bayes.training.tuning.identity import tuning_identity
from hf_bayes.training.tuning.record import TuningRecord, TuningTrial
from hf_bayes.training.tuning.trials import Trials, folder_name
from hf_bayes.uncertainty.custom.base import LikelihoodConfig

NUM_FINALISTS = 4
"""The number of candidates of the second round."""

SHARE = 4
"""The gradients of a finalist, divided by the gradients of the same candidate in the first round."""

LEAST_UPDATES = 40
"""The shortest run: AdamW, the curvature and a few steps of a sampler."""

LEAST_ROWS = 200
"""The smallest number of held-out rows. A smaller set could not tell methods apart that differ by .05 nats."""


class _Plan(NamedTuple):
    """The candidates of both rounds.

    Attributes:
        early: the candidates of the first round.
        late: those that need a longer run than that, and take part in the second round only.
        per_trial: the gradients of a candidate in the first round.
    """

    early: tuple[Candidate, ...]
    late: tuple[Candidate, ...]
    per_trial: int

    @property
    def parts(self) -> int:
        """The gradients of all runs, divided by the gradients of one candidate in the first round."""
        return len(self.early) + (min(NUM_FINALISTS, len(self.early)) + len(self.late)) * SHARE

    def least_per_trial(self, candidate: Candidate, accumulation: int) -> int:
        """Return the smallest ``per_trial`` with which this candidate has enough updates in its first run."""
        share = SHARE if candidate in self.late else 1
        return math.ceil(_least_updates(candidate) * candidate.gradients_per_update * accumulation / share)

    def pays(self, candidate: Candidate, accumulation: int) -> bool:
        """Check whether a run of the first round is long enough for this candidate."""
        return self.per_trial >= candidate.least_updates * candidate.gradients_per_update * accumulation

    def neediest(self, accumulation: int) -> Candidate:
        """Return the candidate that needs the largest ``per_trial``.

        If the first round is too short for all candidates, it is the one with the smallest need: as soon as the round
        is long enough for one of them, the others take part in the second round only.
        """

        def need(candidate: Candidate) -> int:
            return self.least_per_trial(candidate, accumulation)

        if all(self.pays(candidate, accumulation) for candidate in self.early):
            return max((*self.early, *self.late), key=need)
        return min(self.early, key=need)

    def least_budget(self, accumulation: int) -> int:
        """Return the gradients by which the first run of every candidate has enough updates."""
        return self.parts * self.least_per_trial(self.neediest(accumulation), accumulation)


class Tuning(NamedTuple):
    """The result of ``tune``.

    Attributes:
        posterior: the posterior of the chosen candidate, also saved in ``output_dir``.
        chosen: the trial of this candidate.
        rounds: the trials of each round; those of a round have equal budgets. A candidate that needs a longer run than
            the first round allows has a trial in the second one only.
        kept: the trials among which was chosen, those of the finalists in both rounds.
        sentence: the result in words.
    """

    posterior: Posterior
    chosen: TuningTrial
    rounds: tuple[tuple[TuningTrial, ...], ...]
    kept: tuple[TuningTrial, ...]
    sentence: str


def tune(
    model: Any,
    args: BayesianTrainingArguments,
    *,
    train_dataset: Any,
    eval_dataset: Any,
    budget: int | None = None,
    candidates: Sequence[Candidate] | Callable[[BayesianModel], Sequence[Candidate]] = default_candidates,
    subspace: str = "trainable",
    likelihood: LikelihoodConfig | None = None,
    data_collator: Any = None,
    processing_class: Any = None,
) -> Tuning:
    """Compare methods and settings on held-out rows within a budget of gradients, and save the best posterior.

    All candidates run with a small part of the budget. The best of them, and always the best one with a single set
    of weights, run again with four times as much, together with those that need such a long run. Each run fits the
    temperature of its mixture on the held-out rows. Of both runs of these methods, the cheapest within one standard
    error of the lowest NLL is chosen: a longer run may be worse. Finished runs are kept in ``output_dir``, so a call
    that was interrupted goes on where it was, and tries again what failed. Runs of another model, other data or other
    settings are not taken: such a call is refused.

    Args:
        model: a transformers or peft model. Each run attaches it, and it is given back as it was.
        args: as for ``BayesianTrainer``, without a learning rate: a candidate has its own. Their number of updates is
            not used if ``budget`` is given. ``push_to_hub`` makes the repository before the first run, and uploads the
            best posterior.
        train_dataset, data_collator, processing_class, subspace, likelihood: as for ``BayesianTrainer``.
        eval_dataset: at least 200 held-out rows with a length. They decide, so test rows must be others.
        budget: minibatch gradients of all runs together; None means ten times the gradients that ``args`` give to
            four chains.
        candidates: methods and settings; a function of the attached model, or a list.
    Returns:
        The posterior of the chosen candidate, its trial, all trials by round (NLLs in nats per likelihood term), and
        the result in words.
    Raises:
        ValueError: before the first run: for an attached model, an argument that trials do not use, data that the
            model cannot take, a budget or held-out rows that are too few, several processes, or a record of another
            tuning in ``output_dir``, naming what differs. After the last run: if all candidates failed.
    """
    require_repeatable("tune", model, args)
    check_arguments(args, budget)
    _check(train_dataset, eval_dataset)
    given = {
        "train_dataset": train_dataset, "eval_dataset": eval_dataset, "data_collator": data_collator,
        "processing_class": processing_class, "subspace": subspace, "likelihood": likelihood,
    }  # fmt: skip
    rows, plan, identity, guessed = _prepare(model, args, given, budget, candidates)
    trials = Trials(model, args, given, TuningRecord.open(str(args.output_dir), identity))
    if args.push_to_hub:  # as Trainer does: a token that the Hub refuses must not show after hours
        make_repository(repository(args), token=args.hub_token, private=args.hub_private_repo)
    first, second = _run_rounds(trials, plan, show=not args.disable_tqdm)
    finalists = {trial.name for trial in second}
    kept = (*(trial for trial in first if trial.name in finalists), *second)
    chosen = best_of(kept)
    by_name = {candidate.name: candidate for candidate in rows}
    posterior = trials.posterior(by_name[chosen.name], chosen.gradients)
    posterior.save_pretrained(str(args.output_dir))
    text = sentence(chosen, kept) + chance.warning(chosen, guessed)
    draw((first, second), chosen, Path(str(args.output_dir)) / "tuning.png")
    Console().print(as_table(kept, chosen))
    Console().print(text)
    if args.push_to_hub:
        _push(posterior, args)
    return Tuning(posterior, chosen, (first, second), kept, text)


def _prepare(
    model: Any,
    args: BayesianTrainingArguments,
    given: dict[str, Any],
    budget: int | None,
    candidates: Sequence[Candidate] | Callable[[BayesianModel], Sequence[Candidate]],
) -> tuple[tuple[Candidate, ...], _Plan, dict[str, Any], TuningTrial | None]:
    """Return the candidates, their plan, the identity of the tuning, and the comparison with guessing.

    The trainer of a run finds the collator, the columns and the settings that every run has, and refuses bad data.

    Raises:
        ValueError: for anything that would make every run fail, and as ``_check_names`` and ``_plan``.
    """
    data = given["train_dataset"], given["eval_dataset"]
    with (
        undisturbed(*data, given["data_collator"]),
        prepared_run(model, METHODS["map"](), args, given=given) as trainer,
    ):
        rows = tuple(candidates(trainer.bayesian) if callable(candidates) else candidates)
        _check_names(rows)
        plan = _plan(rows, args, budget, len(given["train_dataset"]))
        return rows, plan, tuning_identity(trainer, rows), chance.guess(trainer.bayesian, *data)


def _run_rounds(trials: Trials, plan: _Plan, *, show: bool) -> tuple[tuple[TuningTrial, ...], tuple[TuningTrial, ...]]:
    """Return the trials of the first round, and those of the finalists with ``SHARE`` times the gradients."""
    first: tuple[TuningTrial, ...] = ()
    with tqdm(total=plan.parts * plan.per_trial, unit="gradient", desc="tuning", disable=not show) as bar:
        for candidate in plan.early:
            first = (*first, trials.run(candidate, plan.per_trial, bar))
            # a candidate that is no finalist among some trials is none among more of them
            trials.remove_others(first, _finalists(plan.early, first))
        finalists = (*_finalists(plan.early, first), *plan.late)
        second = tuple(trials.run(candidate, SHARE * plan.per_trial, bar) for candidate in finalists)
    return first, second


def _push(posterior: Posterior, args: BayesianTrainingArguments) -> None:
    """Upload the posterior, as a trainer does at its end."""
    posterior.push_to_hub(
        repository(args),
        token=args.hub_token,
        private=args.hub_private_repo,
        revision=args.hub_revision,
        commit_message="End of tuning",
    )


def _check_names(rows: Sequence[Candidate]) -> None:
    """Check that there are candidates, and that no two have the same name, or the same folder."""
    names = [candidate.name for candidate in rows]
    if not rows or len({folder_name(name) for name in names}) < len(names):
        raise ValueError(
            f"tune needs candidates with names of their own, got {names}: choose names that differ in letters or digits"
        )


def _check(train_dataset: Any, eval_dataset: Any) -> None:
    """Check that the training rows can be counted, and that there are enough held-out rows."""
    require_dataset(train_dataset, "train_dataset")
    if is_stream(train_dataset):
        raise ValueError(
            f"tune runs every method on the same rows, and {type(train_dataset).__name__} is a stream: materialise it"
        )
    if eval_dataset is None or isinstance(eval_dataset, dict) or is_stream(eval_dataset):
        raise ValueError(
            f"tune chooses by eval_dataset, one data set with a length, got {type(eval_dataset).__name__}: give "
            "held-out rows that are not the test rows"
        )
    if len(eval_dataset) < LEAST_ROWS:
        raise ValueError(
            f"eval_dataset has {len(eval_dataset)} rows, too few to choose by: the standard error of a difference "
            f"between methods would be larger than the differences. Hold out at least {LEAST_ROWS} (eval_dataset, or "
            "--validation_fraction or --validation_file of hf-bayes)"
        )


def _plan(rows: Sequence[Candidate], args: BayesianTrainingArguments, budget: int | None, num_rows: int) -> _Plan:
    """Return which candidates run in which round, and the gradients of the first one.

    Raises:
        ValueError: if a chain would have too few updates.
    """
    if budget is not None and not is_count(budget):
        raise ValueError(f"budget must be a number of minibatch gradients, an integer >= 1, got {budget!r}")
    chains = max(candidate.method.num_chains for candidate in rows)
    accumulation = args.gradient_accumulation_steps
    if budget is None:
        per_epoch = math.ceil(num_rows / (args.per_device_train_batch_size * accumulation))
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
        budget = 10 * chains * steps * accumulation
    plan, enough = _rounds(rows, accumulation, budget), budget
    # the candidates of a round depend on the budget, so a plan may need more than the plan that asked for its budget
    while (needed := _rounds(rows, accumulation, enough).least_budget(accumulation)) > enough:
        enough = needed
    if enough > budget:
        neediest = plan.neediest(accumulation)
        number, share = ("second", SHARE) if neediest in plan.late else ("first", 1)
        updates = share * plan.per_trial // (neediest.gradients_per_update * accumulation)
        raise ValueError(
            f"budget={budget:,} gradients give {updates} updates to each of {neediest.method.num_chains} chains of "
            f"{neediest.name} in the {number} round, and {_least_updates(neediest)} are needed: give at least "
            f"{enough:,} (budget, or --budget of hf-bayes), or in Python fewer candidates"
        )
    return plan


def _least_updates(candidate: Candidate) -> int:
    """Return the updates of the shortest run of a candidate."""
    return max(LEAST_UPDATES, candidate.least_updates)


def _rounds(rows: Sequence[Candidate], accumulation: int, budget: int) -> _Plan:
    """Return which candidates run in which round within a budget."""
    plan = _Plan(tuple(rows), (), budget)
    # a late candidate takes more of the budget, so that others may become late, too
    while plan.per_trial != budget // plan.parts:
        plan = plan._replace(per_trial=budget // plan.parts)
        early = tuple(candidate for candidate in plan.early if plan.pays(candidate, accumulation))
        if early:
            late = tuple(candidate for candidate in plan.early if candidate not in early)
            plan = plan._replace(early=early, late=(*plan.late, *late))
    return plan


def _finalists(rows: Sequence[Candidate], trials: Sequence[TuningTrial]) -> list[Candidate]:
    """Return the candidates of the second round: those of the lowest NLL, and the best with one forward pass.

    Args:
        rows: the candidates.
        trials: the trials of the first of them, or of all.
    """
    order = sorted(range(len(trials)), key=lambda index: trials[index].mean_nll)
    best = order[:NUM_FINALISTS]
    single = [index for index in order if rows[index].cost == 1 and math.isfinite(trials[index].mean_nll)][:1]
    if single and single[0] not in best:
        best = [*best[: NUM_FINALISTS - 1], single[0]]
    return [rows[index] for index in best]
