"""Make a posterior of a finished LoRA adapter from held-out rows, without a gradient."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, default_data_collator

from hf_bayes.chains.run import Run
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import require_seed
from hf_bayes.core.types import FinalPassResult, RowScores
from hf_bayes.diagnostics.comparison import difference_std_error, row_scores
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.fit.finished_models import (
    batches_by_number,
    check_first_rows,
    check_sizes,
    config_for,
    model_to_fit,
    require_rows_by_number,
)
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.calibrating import fit_to, heldout_sums
from hf_bayes.models.to_posterior import to_posterior
from hf_bayes.objectives.data_access import DataAccess
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.label_columns import with_columns
from hf_bayes.objectives.likelihood_terms import count_terms_of
from hf_bayes.objectives.model_objective import ModelObjective
from hf_bayes.objectives.passes import member_passes
from hf_bayes.objectives.starting import problem_for
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.tasks import TASKS
from hf_bayes.uncertainty.custom.base import LikelihoodConfig

Batches = Callable[[Sequence[int]], Iterator[dict[str, Any]]]
"""Numbers of held-out rows -> these rows, in this order, in batches."""


@torch.no_grad()
def fit_training_free(
    model: PreTrainedModel | PeftModel | BayesianModel | str | os.PathLike[str],
    heldout: Any,
    method: MethodConfig | None = None,
    *,
    collate: Callable[..., Any] | None = None,
    batch_size: int = 8,
    subspace: str = "trainable",
    num_data: float | None = None,
    data_unit: str = "token",
    noise_std: float | None = None,
    likelihood: LikelihoodConfig | None = None,
    tokenizer: Any = None,
    seed: int = 0,
) -> Posterior:
    """Return the training-free posterior of a finished LoRA adapter (``methods.variational.training_free``).

    The even held-out rows determine the width of the posterior. On the odd rows its loss is compared with the loss of
    the adapter with a temperature, which is fitted on the even rows. The verdict says which is better. Together these
    are at most 11 passes over held-out rows, without gradients. The model is given back as it was.

    Args:
        model: a transformers model with a peft adapter; or a ``BayesianModel``, the directory or Hub id of an adapter
            or of a posterior. Around each member there will be a Gaussian.
        heldout: rows with labels that were not used in training: a list, or a data set with a length.
        method: ``TrainingFreeConfig(...)``; None is the default one.
        collate: rows -> a batch of tensors with ``labels``; None is transformers' default collator.
        batch_size: rows of a forward pass; the result does not depend on it.
        subspace: the name of the parameters that are random, see ``hf_bayes.core.layout.select``; a BayesianModel has
            its own.
        num_data: N of the data that the adapter was trained on, to be stored; None if it is not known.
        data_unit: the unit of N, "token" or "sequence".
        noise_std: the standard deviation of a regression's noise, in units of the labels; other heads refuse it.
        likelihood: the likelihood of the labels (docs/likelihoods.md); None takes the one that belongs to the head's
            configuration. Of a posterior it is known.
        tokenizer: saved with the posterior, which stores its fingerprint.
        seed: the seed of the draws that judge a width, and of a loaded posterior's members: they are the same.
    Returns:
        A posterior whose approximation is a diagonal Gaussian over the factors of LoRA in other coordinates; the
        elements of B and all others are points.
    Raises:
        ValueError: without held-out rows, or with too few; for a model without LoRA, or with an untrained one.
    """
    config = config_for("training_free", method)
    require_seed(seed)
    _check_heldout(heldout)
    check_sizes(batch_size, num_data, data_unit)
    with model_to_fit(
        model, subspace, noise_std, likelihood, method=config, tokenizer=tokenizer, load=load_adapter
    ) as (bayesian, subspace):  # fmt: skip
        collate = with_columns(bayesian.likelihood, collate or default_data_collator)
        _check_terms(bayesian, config, heldout, collate)
        check_first_rows(bayesian, heldout, collate)
        batches = functools.partial(batches_by_number, heldout, model=bayesian, collate=collate, batch_size=batch_size)
        stored = {"subspace": subspace, "num_data": num_data, "data_unit": data_unit, "tokenizer": tokenizer}
        return _fit(bayesian, config, batches, len(heldout), seed=seed, stored=stored)


def read_adapter(place: str | os.PathLike[str]) -> Posterior:
    """Read the posterior in a directory or repository, or the plain peft adapter there, as a posterior of one draw."""
    try:
        return Posterior.from_pretrained(place)
    except FileNotFoundError:
        return Posterior.from_adapters([place])


def load_adapter(
    adapter: str | os.PathLike[str] | Posterior, *, base_model: Any = None, likelihood: LikelihoodConfig | None = None
) -> BayesianModel:
    """Load a posterior, or a plain peft adapter, on its base model, to predict by its members.

    Args:
        adapter: a directory or repository, or what ``read_adapter`` returned.
        base_model, likelihood: as in ``from_pretrained``.
    """
    posterior = adapter if isinstance(adapter, Posterior) else read_adapter(adapter)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*1 member: epistemic uncertainty is 0")  # it will have more
        kind = MODELS[posterior.config.task]
        return kind.from_pretrained(
            posterior, base_model=base_model, prediction="members", calibrated=False, likelihood=likelihood
        )


class Comparison(NamedTuple):
    """The losses on the odd held-out rows, in nats per likelihood term.

    Attributes:
        nll: the loss of the posterior's members.
        point_nll: the loss of the weights alone, at ``temperature``.
        std_error: the standard error of the difference, paired by row; None if it is not defined.
        temperature: the temperature that was fitted on the even rows; 1 if none is better.
        reason: why there is no temperature, in words; empty if there is one.
        num_rows: the number of odd rows.
    """

    nll: float
    point_nll: float
    std_error: float | None
    temperature: float
    reason: str
    num_rows: int

    def describe(self) -> str:
        """Return the comparison in one sentence."""
        rival = f"temperature scaling (t = {self.temperature:.3g})" if not self.reason else "the weights alone"
        figures = f"{self.nll:.4f} nats, {rival} {self.point_nll:.4f}"
        difference, error = self.nll - self.point_nll, self.std_error
        if error is None or abs(difference) <= 2 * error:
            judged = f"neither is better by two standard errors ({2 * (error or 0):.2g})"
        else:
            better = "this posterior" if difference < 0 else rival.partition(" (")[0]
            judged = f"{better} is better by {abs(difference):.2g} (standard error {error:.2g})"
        reason = f" (no temperature: {self.reason})" if self.reason else ""
        return f"On {self.num_rows} other held-out rows: {figures}; {judged}{reason}"


def _check_heldout(heldout: Any) -> None:
    if heldout is None:
        raise ValueError(
            "fit_training_free needs held-out rows, got None: the posterior is as wide as they allow. Give rows with "
            "labels that the adapter was not trained on, or use fit_laplace, which needs training rows"
        )
    require_rows_by_number("fit_training_free", "heldout", heldout)


def _check_terms(model: BayesianModel, config: Any, heldout: Any, collate: Callable[..., Any]) -> None:
    """Check the number of rows, their labels, and that both halves have some."""
    least = 2 * config.requirements.least_rows(TASKS[model.task].unit)
    if len(heldout) < least:
        raise ValueError(
            f"heldout needs at least {least} rows, got {len(heldout)}: one half determines the width, and fewer rows "
            "have no useful standard error"
        )
    reason = "losses are compared row by row: give a collator that does not pack rows"
    count_terms_of(model, heldout, collate, name="heldout", both_halves=True, by_row=reason)


def _fit(
    model: BayesianModel, config: Any, batches: Batches, num_rows: int, *, seed: int, stored: dict[str, Any]
) -> Posterior:
    """Return the posterior that the even rows determine, with a verdict from the odd rows.

    Args:
        stored: what is known of the adapter's training, as arguments of ``to_posterior``.
    """
    found = _search(model, config, batches, num_rows, seed)
    posterior = to_posterior(
        model,
        found.approximation,
        config,
        seed=seed,
        diagnostics=found.report,
        prior={"name": "unknown"},
        **stored,
    )
    return _with_verdict(posterior, _compare(model, posterior, batches, num_rows))


def _search(model: BayesianModel, config: Any, batches: Batches, num_rows: int, seed: int) -> FinalPassResult:
    """Return the posterior that the even rows determine: the result of a run without an update."""
    theta = model.current.detach().cpu()

    def even(numbers: Sequence[int]) -> Iterable[dict[str, Any]]:
        return batches([2 * number for number in numbers])

    data = DataAccess(batches, num_rows, heldout=even, num_heldout=len(range(0, num_rows, 2)))
    scale = DataScale(1.0, num_rows, None, num_rows)
    objective = ModelObjective(member_passes(model, seed=seed), scale, data=data)
    problem = problem_for(model, FlatPrior(), 1.0, seed=seed)
    try:
        run: Run[Any] = Run(config.build(problem), objective, theta, (), problem)
        return run.finish()
    finally:
        objective.close()


def _compare(model: BayesianModel, posterior: Posterior, batches: Batches, num_rows: int) -> Comparison:
    """Compare the posterior with the weights alone at a temperature."""
    even, odd = range(0, num_rows, 2), range(1, num_rows, 2)
    temperature, reason, point = 1.0, "", posterior.approximation.rows
    with model.showing(point):
        try:
            temperature = fit_to(model, heldout_sums(model, batches(even))).temperature
        except ValueError as error:  # numbers, or too few terms
            reason = str(error).partition(":")[0]
    members = posterior.members()
    scores = [_scores(model, theta, t, batches(odd)) for theta, t in ((members, 1.0), (point, temperature))]
    nll, point_nll = (float(one.nll.sum() / one.terms.sum()) for one in scores)
    return Comparison(nll, point_nll, difference_std_error(*scores), temperature, reason, len(odd))


def _scores(model: BayesianModel, theta: Tensor, temperature: float, batches: Iterator[dict[str, Any]]) -> RowScores:
    """Return the scores of the mixture of members at a temperature."""
    nll, terms = [], []
    with model.showing(theta, temperature=temperature):
        for batch in batches:
            nll.append(model.evaluate_batch(batch)[0]["nll"].cpu().double())
            terms.append(model.terms_per_row(batch).cpu())
    return row_scores(torch.cat(nll), torch.cat(terms))


def _with_verdict(posterior: Posterior, compared: Comparison) -> Posterior:
    """Return the posterior with the verdict on its width and on the comparison, and with the losses compared."""
    found = posterior.config.diagnostics
    report = found["training_free"][0]  # the width is the same around all members
    if not report["passes"]:
        how = "still measurably too wide"
    elif report["too_wide"] is None:
        how = "the largest that was tried, since no scale was too wide: the adapter may not help on these rows"
    else:
        how = "the largest whose loss is within the tolerance"
    verdict = (
        f"a Gaussian around given weights, scale {report['scale']:.3g}, {how}: {report['difference']:+.2g} nats "
        f"(standard error {report['std_error']:.2g}) on {report['rows']} held-out rows. {compared.describe()}"
    )
    diagnostics = {"converged": None if report["passes"] else False, "verdict": verdict, **found}
    metrics = {"nll": compared.nll, "map_nll": compared.point_nll}
    if compared.std_error is not None:
        metrics["map_nll_difference_std_error"] = compared.std_error
    config = dataclasses.replace(posterior.config, diagnostics=diagnostics, metrics=metrics)
    return dataclasses.replace(posterior, config=config)
