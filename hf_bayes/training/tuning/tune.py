"""``tune``: compare methods within a budget of gradients, and keep the posterior of the best."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from tqdm import tqdm

from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.data_rows import is_stream
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.data_fingerprint import describe_rows
from hf_bayes.training.repeated_runs import finished_run, require_repeatable
from hf_bayes.training.tuning import chance
from hf_bayes.training.tuning.candidates import Candidate, default_candidates
from hf_bayes.training.tuning.choice import as_table, best_of, sentence
from hf_bayes.training.tuning.figure import draw
from hf_bayes.training.tuning.record import Trial, TuningRecord
from hf_bayes.uncertainty.custom.base import LikelihoodConfig

NUM_FINALISTS = 4
"""The number of candidates of the second round."""

SHARE = 4
"""The gradients of a finalist, over those of the same candidate in the first round."""

LEAST_UPDATES = 40
"""The shortest run of the first round: AdamW, the curvature and a few steps of a sampler."""

LEAST_ROWS = 200
"""The smallest number of held-out rows. A smaller set could not tell methods apart that differ by .05 nats."""

KEPT = ("nll", "accuracy", "ece", "brier", "total", "epistemic", "member_nll")


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
        """The gradients of all runs over those of a candidate in the first round."""
        return len(self.early) + (min(NUM_FINALISTS, len(self.early)) + len(self.late)) * SHARE

    @property
    def costliest(self) -> Candidate:
        """The candidate of the first round whose updates take the most gradients."""
        return max(self.early, key=lambda candidate: candidate.gradients_per_update)

    def least_budget(self, accumulation: int) -> int:
        """Return the gradients by which every run of the first round has ``LEAST_UPDATES``."""
        return self.parts * math.ceil(LEAST_UPDATES * self.costliest.gradients_per_update * accumulation)


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
    chosen: Trial
    rounds: tuple[tuple[Trial, ...], ...]
    kept: tuple[Trial, ...]
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
    that was interrupted goes on where it was.

    Args:
        model: a transformers or peft model. Each run attaches it, and it is given back as it was.
        args: as for ``BayesianTrainer``. Their number of updates is not used if ``budget`` is given.
        train_dataset, data_collator, processing_class, subspace, likelihood: as for ``BayesianTrainer``.
        eval_dataset: at least 200 held-out rows with a length. They decide, so test rows must be others.
        budget: minibatch gradients of all runs together; None means ten times the gradients that ``args`` give to
            four chains.
        candidates: methods and settings; a function of the attached model, or a list.
    Returns:
        The posterior of the chosen candidate, its trial, all trials by round (NLLs in nats per likelihood term), and
        the result in words.
    Raises:
        ValueError: before the first run: for an attached model, a budget or held-out rows that are too few, several
            processes, or a record of another tuning in ``output_dir``.
    """
    require_repeatable("tune", model, args)
    _check(eval_dataset)
    with attach(model, subspace=subspace, noise_std=args.noise_std, likelihood=likelihood) as bayesian:
        rows = tuple(candidates(bayesian)) if callable(candidates) else tuple(candidates)
        guessed = chance.guess(bayesian, train_dataset, eval_dataset)
    _check_names(rows)
    plan = _plan(rows, args, budget, len(train_dataset))
    given = {
        "train_dataset": train_dataset, "eval_dataset": eval_dataset, "data_collator": data_collator,
        "processing_class": processing_class, "subspace": subspace, "likelihood": likelihood,
    }  # fmt: skip
    record = TuningRecord.open(str(args.output_dir), _identity(rows, args, **given))
    trials = _Trials(model, args, given, record)
    first, second = _run_rounds(trials, plan, show=not args.disable_tqdm)
    finalists = {trial.name for trial in second}
    kept = (*(trial for trial in first if trial.name in finalists), *second)
    chosen = best_of(kept)
    posterior = Posterior.from_pretrained(trials.folder(chosen))
    posterior.save_pretrained(str(args.output_dir))
    text = sentence(chosen, kept) + chance.warning(chosen, guessed)
    draw((first, second), chosen, Path(str(args.output_dir)) / "tuning.png")
    Console().print(as_table(kept, chosen))
    Console().print(text)
    return Tuning(posterior, chosen, (first, second), kept, text)


def trial_folder(output_dir: Path, name: str, gradients: int) -> Path:
    """Return the folder in which a tuning keeps the posterior of a finalist's trial."""
    return output_dir / "finalists" / f"{_folder_name(name)}_{gradients}"


def _folder_name(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _identity(
    rows: Sequence[Candidate],
    args: BayesianTrainingArguments,
    *,
    train_dataset: Any,
    eval_dataset: Any,
    data_collator: Any,
    subspace: str,
    likelihood: LikelihoodConfig | None,
    **others: Any,
) -> dict[str, Any]:
    """Return the data and settings that a call must have in common with the earlier calls whose runs it takes."""
    collate = data_collator or (lambda rows: rows)
    return {
        "rows": describe_rows(train_dataset, collate, seed=args.seed), "num_rows": len(train_dataset),
        "held-out rows": describe_rows(eval_dataset, collate, seed=args.seed), "num_heldout": len(eval_dataset),
        "seed": args.seed, "batch": args.per_device_train_batch_size, "subspace": subspace,
        "likelihood": None if likelihood is None else likelihood.to_dict(),
        "methods": {c.name: [c.method.to_dict(), c.learning_rate] for c in rows},
    }  # fmt: skip


class _Trials:
    """Runs of candidates on one model."""

    def __init__(
        self, model: Any, args: BayesianTrainingArguments, given: dict[str, Any], record: TuningRecord
    ) -> None:
        self._model, self._args, self._given, self._record = model, args, given, record

    def folder(self, trial: Trial) -> Path:
        """Return the folder of a trial's posterior."""
        return trial_folder(Path(str(self._args.output_dir)), trial.name, trial.gradients)

    def remove_others(self, trials: Sequence[Trial], finalists: Sequence[Candidate]) -> None:
        """Remove the posteriors of trials whose candidates are no finalists."""
        names = {candidate.name for candidate in finalists}
        for trial in trials:
            if trial.name not in names:
                shutil.rmtree(self.folder(trial), ignore_errors=True)

    def run(self, candidate: Candidate, gradients: int, bar: Any) -> Trial:
        """Return the trial of a candidate, finished now or by an earlier call. Its posterior is saved."""
        bar.set_postfix_str(candidate.name)
        found = self._record.find(candidate.name, gradients)
        if found is None:
            begin = time.perf_counter()
            try:
                metrics, nll, terms = self._train(candidate, gradients)
                failure = ""
            except (ValueError, FloatingPointError) as error:  # one candidate must not end the others
                metrics, nll, terms, failure = {}, [], [], str(error)
            seconds = time.perf_counter() - begin
            found = Trial(candidate.name, gradients, seconds, candidate.cost, metrics, nll, terms, failure)
            self._record.add(found)
        bar.update(gradients)
        return found

    def _train(self, candidate: Candidate, gradients: int) -> tuple[dict[str, float], list[float], list[int]]:
        updates = gradients // candidate.gradients_per_update // self._args.gradient_accumulation_steps
        changes = {
            "output_dir": str(trial_folder(Path(str(self._args.output_dir)), candidate.name, gradients)),
            "learning_rate": candidate.learning_rate, "max_steps": max(1, updates),
        }  # fmt: skip
        with finished_run(self._model, candidate.method, self._args, given=self._given, **changes) as trainer:
            trainer.evaluate()
            trainer.save_model()
            evaluation = trainer.outcome.evaluator.last["eval"]
            assert evaluation.rows is not None
            metrics = {name: evaluation.metrics[name] for name in KEPT if name in evaluation.metrics}
            temperature = trainer.posterior.config.calibration.get("temperature", 1.0)
            return (
                {**metrics, "temperature": temperature},
                [round(value, 6) for value in evaluation.rows.nll.tolist()], evaluation.rows.terms.tolist(),
            )  # fmt: skip


def _run_rounds(trials: _Trials, plan: _Plan, *, show: bool) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
    """Return the trials of the first round, and those of the finalists with ``SHARE`` times the gradients."""
    first: tuple[Trial, ...] = ()
    with tqdm(total=plan.parts * plan.per_trial, unit="gradient", desc="tuning", disable=not show) as bar:
        for candidate in plan.early:
            first = (*first, trials.run(candidate, plan.per_trial, bar))
            # a candidate that is no finalist among some trials is none among more of them
            trials.remove_others(first, _finalists(plan.early, first))
        finalists = (*_finalists(plan.early, first), *plan.late)
        second = tuple(trials.run(candidate, SHARE * plan.per_trial, bar) for candidate in finalists)
    return first, second


def _check_names(rows: Sequence[Candidate]) -> None:
    """Check that there are candidates, and that no two have the same name, or the same folder."""
    names = [candidate.name for candidate in rows]
    if not rows or len({_folder_name(name) for name in names}) < len(names):
        raise ValueError(
            f"tune needs candidates with names of their own, got {names}: choose names that differ in letters or digits"
        )


def _check(eval_dataset: Any) -> None:
    """Check the held-out rows."""
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
        costliest = plan.costliest
        updates = max(0, plan.per_trial // (costliest.gradients_per_update * accumulation))
        raise ValueError(
            f"budget={budget:,} gradients give {updates} updates to each of "
            f"{costliest.method.num_chains} chains of {costliest.name} in the first round, and {LEAST_UPDATES} are "
            f"needed: give at least {enough:,} (budget, or --budget of hf-bayes), or in Python fewer candidates"
        )
    return plan


def _rounds(rows: Sequence[Candidate], accumulation: int, budget: int) -> _Plan:
    """Return which candidates run in which round within a budget."""
    plan = _Plan(tuple(rows), (), budget)
    # a late candidate takes more of the budget, so that others may become late, too
    while plan.per_trial != budget // plan.parts:
        plan = plan._replace(per_trial=budget // plan.parts)
        pays = [plan.per_trial >= c.least_updates * c.gradients_per_update * accumulation for c in plan.early]
        if any(pays):
            early = tuple(c for c, enough in zip(plan.early, pays, strict=True) if enough)
            late = tuple(c for c, enough in zip(plan.early, pays, strict=True) if not enough)
            plan = plan._replace(early=early, late=(*plan.late, *late))
    return plan


def _finalists(rows: Sequence[Candidate], trials: Sequence[Trial]) -> list[Candidate]:
    """Return the candidates of the second round: those of the lowest NLL, and the best with one forward pass.

    Args:
        rows: the candidates.
        trials: the trials of the first of them, or of all.
    """
    order = sorted(range(len(trials)), key=lambda index: trials[index].mean_nll)
    best = order[:NUM_FINALISTS]
    single = [index for index in order if rows[index].cost == 1][:1]
    if single and single[0] not in best:
        best = [*best[: NUM_FINALISTS - 1], single[0]]
    return [rows[index] for index in best]
