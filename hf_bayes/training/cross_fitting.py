"""A temperature of the mixture without held-out rows, by cross-fitting on the training rows.

The rows are dealt to K folds. For each fold, the method trains on the other folds, and its mixture predicts the rows of
the fold, which it has not seen. One temperature is fitted on the predictions of all rows. It belongs to posteriors of
(K - 1) / K of the rows, which are less sure than the posterior of all rows: more folds make the difference smaller.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch.utils.data import Subset
from tqdm import tqdm

from hf_bayes.chains.own_settings import with_own_settings
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.number_checks import is_count
from hf_bayes.core.rng import generator
from hf_bayes.methods.registry import from_dict
from hf_bayes.metrics.calibration import GroupSums
from hf_bayes.models.calibrating import fit_to, heldout_sums, predicting_as_loaded
from hf_bayes.objectives.data_rows import is_stream
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.prediction_fits import with_temperature
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.data.heldout_rows import HeldOutData
from hf_bayes.training.repeated_runs import finished_run, require_repeatable
from hf_bayes.training.trainer_host import TrainerHost, expected_updates
from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.custom.registry import likelihood_from


def cross_fit_calibration(
    posterior: Posterior,
    model: Any,
    args: BayesianTrainingArguments,
    *,
    train_dataset: Any,
    num_folds: int = 5,
    subspace: str = "trainable",
    likelihood: LikelihoodConfig | None = None,
    data_collator: Callable[..., Any] | None = None,
    processing_class: Any = None,
) -> Posterior:
    """Return the posterior with a temperature of its mixture, fitted without held-out rows.

    The method trains ``num_folds`` times more. Where some hundreds of rows can be held out, give them to the trainer
    as ``eval_dataset`` instead: that costs one pass over them.

    Args:
        posterior: the result of a run on all of ``train_dataset``.
        model: the transformers or peft model of that run, before training. It is given back as it was.
        args: the arguments of that run; each fold has as many epochs (or ``max_steps``). Its warm start, burn-in and
            thinning are those of the run, in proportion to its length.
        train_dataset: rows with a length, and labels that are classes.
        num_folds: K, at least 2.
        subspace, data_collator, processing_class: as for ``BayesianTrainer``.
        likelihood: the likelihood that the posterior stores, if its class is not registered.
    Raises:
        ValueError: before the first run: for an attached model, several processes, a stream, fewer rows than folds, or
            a method that needs held-out rows.
    """
    method = from_dict(posterior.config.method)
    require_repeatable("cross_fit_calibration", model, args)
    _check(method.requirements.heldout_setting, train_dataset, num_folds)
    order = torch.randperm(len(train_dataset), generator=generator(args.seed, "folds"))
    folds = [order[fold::num_folds].tolist() for fold in range(num_folds)]
    given: dict[str, Any] = {
        "data_collator": data_collator, "processing_class": processing_class, "subspace": subspace,
    }  # fmt: skip
    if (stored := posterior.config.head.get("likelihood")) is not None:
        given["likelihood"] = likelihood_from(stored, given=likelihood)
    own = _has_own_step_size(posterior)
    changes: dict[str, Any] = {"calibrate": False} | ({"learning_rate": None} if own else {})
    lengths = _updates(method, args, train_dataset)
    sums, found = GroupSums.empty(), None
    for fold in tqdm(range(num_folds), desc="folds", disable=args.disable_tqdm):
        others = sorted(set(order.tolist()) - set(folds[fold]))
        rows = {"train_dataset": _rows(train_dataset, others), "eval_dataset": _rows(train_dataset, folds[fold])}
        shorter = _for_fold(method, lengths, _updates(method, args, rows["train_dataset"]), own_step_size=own)
        with (
            tempfile.TemporaryDirectory() as directory,
            finished_run(model, shorter, args, given=given | rows, output_dir=directory, **changes) as trainer,
            predicting_as_loaded(trainer.bayesian, trainer.posterior),
            torch.no_grad(),
        ):
            here = heldout_sums(trainer.bayesian, HeldOutData(TrainerHost(trainer)).by_number(range(len(folds[fold]))))
            sums = GroupSums(*(total + part for total, part in zip(sums, here, strict=True)))
            if fold == num_folds - 1:
                found = fit_to(trainer.bayesian, sums)
    assert found is not None  # the last fold sets it
    return with_temperature(posterior, found.to_dict())


def _has_own_step_size(posterior: Posterior) -> bool:
    """Check whether the run of a sampler found its step size by itself, although ``args`` may have a learning rate.

    Without a method, that rate was only the one of a warm start. Only such a run allows gradient noise to heat chains.
    """
    return (posterior.config.diagnostics.get("heating") or 0.0) > 0


def _for_fold(method: MethodConfig, num_steps: int, num_fold_steps: int, *, own_step_size: bool) -> MethodConfig:
    """Return the config of a fold, whose numbers of updates are in proportion to its length.

    Args:
        method: as the run settled it.
        num_steps, num_fold_steps: the updates of the run and of the fold.
        own_step_size: the run had no learning rate. If it chose its warm start and burn-in, the fold chooses, too.
    """
    open_lengths = replace(method, warm_start_steps=None, burn_in=None)
    if own_step_size and with_own_settings(open_lengths, num_steps) == method:
        return open_lengths
    share = Fraction(num_fold_steps, num_steps)
    warm, burn_in, thin = method.warm_start_steps, method.burn_in, method.thin
    return replace(
        method,
        warm_start_steps=None if warm is None else int(share * warm),
        burn_in=burn_in if burn_in is None or burn_in < 1 else math.ceil(share * int(burn_in)),
        thin=None if thin is None else max(1, int(share * thin)),
    )


def _updates(method: MethodConfig, args: BayesianTrainingArguments, rows: Any) -> int:
    """Return the number of updates of a run on these rows; 1 if it does not depend on their number, or is not known."""
    return 1 if method.requirements.all_data_in_every_update else expected_updates(args, rows) or 1


def _check(heldout_setting: str, rows: Any, num_folds: int) -> None:
    if not is_count(num_folds, minimum=2):
        raise ValueError(f"num_folds must be an integer >= 2, got {num_folds!r}")
    if heldout_setting:
        raise ValueError(
            f"cross-fitting is for runs without held-out rows, and {heldout_setting} needs some: give them to the "
            "trainer as eval_dataset, which fits the temperature on them"
        )
    if is_stream(rows):
        raise ValueError(
            f"folds need a train_dataset with a length, got {type(rows).__name__}: hold rows out, and give them to the "
            "trainer as eval_dataset"
        )
    if len(rows) < 2 * num_folds:
        raise ValueError(f"{num_folds} folds need at least {2 * num_folds} rows, got {len(rows)}: lower num_folds")


def _rows(dataset: Any, numbers: list[int]) -> Any:
    return dataset.select(numbers) if hasattr(dataset, "select") else Subset(dataset, numbers)
