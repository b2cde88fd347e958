"""``fit_laplace``: a model that is trained already -> a posterior, in one pass over the data."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, default_data_collator

from hf_bayes.chains.run import Run
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import require_seed
from hf_bayes.core.types import Prior
from hf_bayes.diagnostics.informed_spread import InformedSpread
from hf_bayes.diagnostics.verdict import Diagnostics
from hf_bayes.distributions.priors import build_prior
from hf_bayes.fit.finished_models import (
    batches_by_number,
    check_first_rows,
    check_sizes,
    config_for,
    model_to_fit,
    require_rows_by_number,
)
from hf_bayes.members.mesh import ChainMesh
from hf_bayes.metrics.calibration import MIN_TERMS, require_enough
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.calibrating import calibration_by_number, predicting_as_loaded, reason_without_temperature
from hf_bayes.models.classification import problem_of
from hf_bayes.models.inherited_prior import Inherited, inherit
from hf_bayes.models.prediction_state import PredictionState
from hf_bayes.models.preferences import REFERENCE, BayesianModelForPreferences
from hf_bayes.models.to_posterior import to_posterior
from hf_bayes.objectives.batches import PAD_ROWS
from hf_bayes.objectives.data_access import DataAccess
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.informed_spread import LEAST_ROWS, NUM_DRAWS, SPREAD_SHARE, SpreadPlan, measure_spread
from hf_bayes.objectives.label_columns import with_columns
from hf_bayes.objectives.likelihood_terms import count_terms_of
from hf_bayes.objectives.model_objective import ModelObjective
from hf_bayes.objectives.passes import member_passes
from hf_bayes.objectives.starting import likelihood_facts, problem_for
from hf_bayes.posteriors.hub import is_place
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.prediction_fits import with_temperature
from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.likelihoods import Normal


@torch.inference_mode(False)  # a tensor of that mode cannot be differentiated
def fit_laplace(
    model: PreTrainedModel | PeftModel | BayesianModel | str | os.PathLike[str],
    data: Any,
    method: MethodConfig | None = None,
    *,
    collate: Callable[..., Any] | None = None,
    batch_size: int = 8,
    num_data: float | None = None,
    data_unit: str = "token",
    subspace: str = "trainable",
    prior: Posterior | str | os.PathLike[str] | None = None,
    noise_std: float | None = None,
    likelihood: LikelihoodConfig | None = None,
    tokenizer: Any = None,
    heldout: Any = None,
    seed: int = 0,
) -> Posterior:
    """Return the Laplace approximation around given weights: a finished adapter, or each draw of a posterior.

    Of several processes (``torchrun``) all must call it: they share the rows, and each returns the whole.

    The model is given back as it was. Its weights should maximise the posterior under the method's prior; how far they
    are from that is measured, stored, and warned of.

    Args:
        model: a transformers or peft model; or a ``BayesianModel``, or the directory of a posterior, around each of
            whose members there will be a Gaussian: a mixture.
        data: rows by number, for ``collate``, with labels; no DataLoader, no stream. What the weights were trained on.
        method: ``LaplaceConfig(...)``; None is the default one.
        collate: rows -> a batch of tensors with ``labels``; None is transformers' default collator.
        batch_size: rows of a forward; the result does not depend on it.
        num_data: N, if it is not the number of likelihood terms in the data.
        data_unit: "token", or "sequence": N counts rows.
        subspace: the name of the parameters that are random, see ``hf_bayes.core.layout.select``; a BayesianModel has
            its own.
        prior: a posterior, its directory or Hub id, in place of ``prior_std`` (``hf_bayes.models.inherited_prior``).
        noise_std: the standard deviation of a regression's noise, in units of the labels; other heads refuse it. With
            ``fit_noise`` in the method it is the start of the fit, and None is 1.
        likelihood: the likelihood of the labels, such as ``Poisson()`` (docs/likelihoods.md); None takes the one that
            belongs to the head's configuration. A BayesianModel and a posterior have their own.
        tokenizer: saved with the posterior, which stores its fingerprint; None keeps that of a given posterior.
        heldout: rows like ``data`` that were not used in training, with at least 50 labels. They fit a temperature of
            the mixture, as in ``fit_calibration``. With ``LaplaceConfig(fit_prior="heldout")`` they also fit the prior
            precision. Then fewer labels, or labels that are numbers, are allowed, and give no temperature.
        seed: the seed of the labels that are drawn for the GGN, and of the draws that judge a prior.
    Raises:
        ValueError: before the pass, for a model, data or method that it cannot be made of, and for held-out rows that
            cannot fit what they are given for; after it, if H + tau is not positive definite.
    """
    config = config_for("laplace", method)
    require_seed(seed)
    _require_heldout(config, heldout)
    _check_data(data, heldout, config, batch_size, num_data, data_unit)
    noise_std = _starting_noise(model, config, noise_std, likelihood)
    with model_to_fit(
        model, subspace, noise_std, likelihood, method=config, tokenizer=tokenizer
    ) as (bayesian, subspace):  # fmt: skip
        inherited = None if prior is None else inherit(prior, bayesian, config, data_unit=data_unit)
        if inherited is not None:
            inherited.check_tokenizer(tokenizer)
        collate = with_columns(bayesian.likelihood, collate or default_data_collator)
        given = _Data(data, heldout, collate, batch_size, num_data, data_unit)
        return _fit(bayesian, given, config, inherited, subspace=subspace, tokenizer=tokenizer, seed=seed)


class _Data(NamedTuple):
    """The rows of a fit, and the number N of their likelihood terms.

    Attributes:
        rows: the rows that the weights were trained on.
        heldout: other rows, or None.
        collate: rows -> a batch whose labels carry the columns that the likelihood reads.
        batch_size: the number of rows in a forward pass.
        num_data: N, if it is not the number of likelihood terms in the rows.
        data_unit: the unit of N, "token" or "sequence".
    """

    rows: Any
    heldout: Any
    collate: Callable[..., Any]
    batch_size: int
    num_data: float | None
    data_unit: str

    def total(self, terms: int) -> float:
        """Return N, given the number of likelihood terms in the rows."""
        return float(self.num_data or (len(self.rows) if self.data_unit == "sequence" else terms))

    def access(self, model: BayesianModel) -> DataAccess:
        """Return the rows and the held-out rows by number, in batches on the device of the model."""
        batches = functools.partial(batches_by_number, model=model, collate=self.collate, batch_size=self.batch_size)
        found = DataAccess(functools.partial(batches, self.rows), len(self.rows))
        if self.heldout is None:
            return found
        return found._replace(heldout=functools.partial(batches, self.heldout), num_heldout=len(self.heldout))


def _starting_noise(
    model: Any, config: Any, noise_std: float | None, likelihood: LikelihoodConfig | None
) -> float | None:
    """Return the noise of a plain model: a noise that will be fitted begins at 1."""
    plain = likelihood is None and not (is_place(model) or isinstance(model, BayesianModel))
    if noise_std is None and config.fit_noise and plain and problem_of(model.config) == "regression":
        return 1.0
    return noise_std


def _check_data(data: Any, heldout: Any, config: Any, batch_size: Any, num_data: Any, data_unit: Any) -> None:
    """Check rows and sizes, before a model is loaded."""
    for name, given in (("data", data), ("heldout", heldout)):
        if given is not None or name == "data":
            require_rows_by_number("fit_laplace", name, given)
    if config.fit_prior == "heldout" and len(heldout) == 1:
        raise ValueError("heldout= needs at least 2 rows, got 1: half of them may decide for the others")
    check_sizes(batch_size, num_data, data_unit)


def _fit(
    model: BayesianModel, data: _Data, config: Any, inherited: Inherited | None, *, subspace: str, tokenizer: Any,
    seed: int,
) -> Posterior:  # fmt: skip
    """Return the posterior around the model's weights, with its verdict and, if held-out rows allow, a temperature.

    Args:
        inherited: the posterior that is the prior, or None.
        subspace: the name of the model's subspace, which is stored.
    """
    _require_reference(model, data.rows, data.collate)
    count = functools.partial(count_terms_of, model, collate=data.collate)
    config.spec.check_size(model.layout.dim)  # before rows are counted
    config.spec.check_likelihood(model.likelihood.lacks)
    terms, most = count(data.rows, name="data", by_row=f"the gradients of rows are squared one by one: {PAD_ROWS}")
    config.spec.check_size(model.layout.dim, likelihood_facts(model, most))
    check_first_rows(model, data.rows, data.collate)
    tempers = False
    if data.heldout is not None:
        num_terms, _ = count(data.heldout, name="heldout", both_halves=config.requirements.heldout == "split")
        tempers = _takes_temperature(model, config, num_terms)
    total, num_rows = data.total(terms), len(data.rows)
    theta = model.current.detach().cpu()
    problem = problem_for(model, _prior(model, theta, config, inherited), total, most_terms=most, seed=seed)
    data_access = data.access(model)
    scale = DataScale(total, num_rows, terms, rows_per_update=num_rows)
    mesh = ChainMesh(1, torch.device(model.device))
    objective = ModelObjective(member_passes(model, mesh=mesh, seed=seed), scale, data=data_access)
    before = PredictionState(model)
    try:
        run: Run[Any] = Run(config.build(problem), objective, theta, (), problem)  # it makes no update
        found = run.finish()
        if found.noise_std is not None:
            model.likelihood = Normal(found.noise_std)
        plan = SpreadPlan(
            found.approximation, problem.prior, problem.shapes, config.prior_weight, True, _cost(num_rows)
        )
        fitted = config.fit_prior is not None or found.noise_std is not None
        spread = None if fitted else measure_spread(objective, plan, seed=seed)
        posterior = to_posterior(
            model, found.approximation, config, subspace=subspace, num_data=total, data_unit=data.data_unit,
            tokenizer=tokenizer, seed=seed, diagnostics={**_judged(spread, theta, config), **found.report},
            prior=None if inherited is None else inherited.record,
        )  # fmt: skip
    finally:
        before.restore()
        objective.close()
    return _with_temperature(model, posterior, data_access, mesh) if tempers else posterior


def _require_reference(model: BayesianModel, data: Any, collate: Callable[..., Any]) -> None:
    """Raise if the model is its own reference under the likelihood of DPO: all rewards would be 0."""
    if not isinstance(model, BayesianModelForPreferences) or model.other_reference is not None:
        return
    if bool((model.current == model.reference).all()) and REFERENCE not in collate([data[0]]):
        raise ValueError(
            "the model is its own reference, so that the rewards of all answers are 0: give the log-probabilities of "
            f"the reference model as the column {REFERENCE!r} [2] of the data, or train with a BayesianTrainer "
            "(docs/dpo.md)"
        )


def _cost(num_rows: int) -> float:
    """Return a number of gradients that pays for measuring the spread on all rows, or on the least number of them."""
    return max(num_rows, LEAST_ROWS * (1 + NUM_DRAWS["gaussian"])) / SPREAD_SHARE


def _judged(spread: InformedSpread | None, theta: Tensor, config: MethodConfig) -> dict[str, Any]:
    """Return the verdict on a Gaussian around given points, with the measurement behind it."""
    if spread is None:
        return {"converged": None, "verdict": f"a Gaussian around {len(theta)} given points: not assessed"}
    found: dict[str, Any] = {
        "informed_spread": spread.temperature,
        "informed_spread_std_error": spread.std_error,
        "kind": "gaussian",
    }
    judged = Diagnostics(
        dim=theta.shape[1], distance=[], temperature=config.temperature,
        spread_advice=config.requirements.spread_advice, **found,
    ).summary()  # fmt: skip
    return {name: judged[name] for name in ("converged", "verdict", "epistemic_size", "temperature", *found)}


def _require_heldout(config: Any, heldout: Any) -> None:
    if config.fit_prior == "heldout" and heldout is None:
        raise ValueError("fit_prior='heldout' fits by the rows of heldout=, got None: give them, or use 'evidence'")


def _takes_temperature(model: BayesianModel, config: Any, num_terms: int) -> bool:
    """Return whether a temperature of the mixture is to be fitted on held-out rows.

    Raises:
        ValueError: if no temperature can be fitted, and the rows do not choose the prior.
    """
    reason = reason_without_temperature(model)
    if config.fit_prior == "heldout":
        return reason is None and num_terms >= MIN_TERMS
    if reason is not None:
        raise ValueError(
            f"heldout= fits a temperature of the mixture, and {reason}: leave heldout out, or let it choose the prior "
            "by LaplaceConfig(fit_prior='heldout')"
        )
    require_enough(num_terms)
    return True


def _with_temperature(model: BayesianModel, posterior: Posterior, data: DataAccess, mesh: ChainMesh) -> Posterior:
    """Return the posterior with a temperature for the predictions of a model that is loaded from it.

    Without one, and with a warning, if the predictions allow none: the finished pass must not be lost.
    """
    assert data.heldout is not None
    with torch.no_grad(), model.showing(posterior.members()), predicting_as_loaded(model, posterior):
        try:
            found = calibration_by_number(model, data.heldout, range(data.num_heldout), mesh)
        except ValueError as error:
            warnings.warn(f"predictions are not calibrated: {error}", stacklevel=2)
            return posterior
    return with_temperature(posterior, found.to_dict())


def _prior(model: BayesianModel, theta: Tensor, config: MethodConfig, inherited: Inherited | None) -> Prior:
    """Return the prior of a fit around ``theta`` [M, d]."""
    if config.prior_mean == "initial":
        raise ValueError(
            'prior_mean="initial" is where training started, which a finished model no longer holds: use "zero"'
        )
    return build_prior(config, model.layout, theta[0], model.model, None if inherited is None else inherited.gaussian)
