"""A posterior as the prior of the next run: learning one data set after another (posteriors section 5.2).

    p(theta | D_1, D_2) ~ p(D_2 | theta) p(theta | D_1)

is exact. The prior is one Gaussian, that of the last posterior (Huszar 2018), not one Gaussian per earlier data set.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hf_bayes.core.config import MethodConfig
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import require_density
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.loading import base_model
from hf_bayes.models.loading.posterior import check_tokenizer, read
from hf_bayes.posteriors.hub import is_place
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.uncertainty.custom.weighted import Weighted, without_weights
from hf_bayes.uncertainty.likelihoods import Likelihood

logger = logging.getLogger(__name__)

_SCALING = ("lora_alpha", "use_rslora", "alpha_pattern", "use_dora", "fan_in_fan_out")
"""Fields of a LoRA that change the model of a given theta; other fields change names or shapes."""


class Inherited(NamedTuple):
    """A posterior as a prior.

    Attributes:
        gaussian: a Gaussian of one component.
        record: its origin, as JSON: the ``prior`` entry of the next posterior.
        posterior: the posterior itself.
    """

    gaussian: Gaussian
    record: dict[str, Any]
    posterior: Posterior

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise if the next run has another tokenizer; warn if it has none.

        Raises:
            ValueError: if the prior was made with another tokenizer.
        """
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            check_tokenizer(self.posterior, tokenizer)
            return
        expected = self.posterior.config.base_model["fingerprint"]["tokenizer"]
        if expected is not None:
            logger.warning(
                "the prior (%s) was made with a tokenizer (fingerprint %s), and this run was given none to compare: "
                "with another tokenizer the same ids are other words, without any error. Give processing_class= to a "
                "trainer, tokenizer= to a fit",
                self.record["posterior"] or self.record["method"], expected[:12],
            )  # fmt: skip


def inherit(
    prior: str | os.PathLike[str] | Posterior,
    model: BayesianModel,
    method: MethodConfig,
    *,
    data_unit: str,
) -> Inherited:
    """Return a posterior as the prior for the random parameters of ``model``.

    Draws and mixtures of Gaussians become the diagonal Gaussian with their moments.

    Args:
        prior: a posterior, its directory or its Hub id.
        data_unit: the unit of N in this run.
    Raises:
        ValueError: if the posterior belongs to another base model, subspace or unit of the data, or the method's config
            sets another prior. (Tokenizers: ``Inherited.check_tokenizer``.)
    """
    place = prior if is_place(prior) else None
    posterior = read(prior)
    source = posterior.config.method["name"] if place is None else str(place)
    what = f"prior ({source})"
    _refuse_second_prior(method)
    _check_subspace(posterior, model, what)
    _check_base(posterior, model, what)
    unit = posterior.config.data_unit
    if unit in ("token", "sequence") and unit != data_unit:
        raise ValueError(
            f"{what} counts each {unit} as a datum, this run each {data_unit}: their precisions are on two scales. Set "
            f"data_unit={unit!r}"
        )
    gaussian = _gaussian_of(posterior, what)
    record = {
        "posterior": None if place is None else str(_absolute(place)),
        "fingerprint": posterior.fingerprint,
        "method": posterior.config.method["name"],
        "approximation": posterior.approximation.kind,
        "used_as": gaussian.kind,
        "num_data": posterior.config.num_data,
        "prior": posterior.config.prior,
    }
    return Inherited(gaussian, record, posterior)


def _refuse_second_prior(method: MethodConfig) -> None:
    """Raise if the method's config sets a prior, too."""
    if method.given_prior:
        given = ", ".join(f"{name}={value!r}" for name, value in method.given_prior.items())
        raise ValueError(
            f"{method.name}: {given} and another posterior are two priors: that one has its own mean and covariance. "
            f"Leave out {', '.join(method.given_prior)}"
        )


def _check_base(posterior: Posterior, model: BayesianModel, what: str) -> None:
    """Raise if the posterior belongs to another base model, or to a head with other outputs."""
    found = base_model.describe(model.model, model.core, model.layout)
    if problems := base_model.differences(posterior.config.base_model, found):
        raise ValueError(f"{what} belongs to another base model: this one has {'; '.join(problems)}")
    # the rows of a head belong to its labels: in another order one label would inherit the prior of another
    if problems := base_model.output_differences(posterior.config.head, model.core.config):
        raise ValueError(
            f"{what} is of a head whose outputs stand for something else: this model's config has "
            f"{'; '.join(problems)}. Give it the labels (id2label, label2id) and the problem_type of the earlier run"
        )
    before, now = _likelihood_of(posterior.config.head), _likelihood_of_model(model.likelihood)
    if "labels" in posterior.config.head and before != now:
        raise ValueError(
            f"{what} was trained with likelihood={before}, and this run has likelihood={now} (None: the head's own), "
            "so their outputs mean different things: give the run the likelihood of the prior"
        )


def _likelihood_of(head: Mapping[str, Any]) -> str | None:
    """Return the name of the user's likelihood that a posterior's outputs belong to; None for the head's own."""
    stored = head.get("likelihood")
    if stored is not None and stored["name"] == Weighted.name:  # weights do not change what outputs mean
        stored = stored["of"]
    return None if stored is None else str(stored["name"])


def _likelihood_of_model(likelihood: Likelihood) -> str | None:
    """Return the name of the user's likelihood of a model; None for the head's own."""
    own = without_weights(likelihood).config
    return None if own is None else own.name


def _gaussian_of(posterior: Posterior, what: str) -> Gaussian:
    """Return one Gaussian with the moments of the posterior."""
    approximation = posterior.approximation
    try:
        gaussian = approximation.single()
        require_density(gaussian.std)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    if posterior.adapter_config and len(set(approximation.chains)) > 1:
        logger.warning(
            "%s is fitted to draws of several chains: their LoRA factors need not agree, and a mean over different A "
            "and B is not a model of any chain. Take a Gaussian posterior, or draws of one chain",
            what,
        )
    return gaussian


def _absolute(prior: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return a path as an absolute path, and a Hub id unchanged."""
    return Path(prior).absolute() if Path(prior).exists() else prior


def _check_subspace(posterior: Posterior, model: BayesianModel, what: str) -> None:
    before, now = posterior.layout.named_shapes, model.layout.named_shapes
    for name in [*now, *before]:
        if before.get(name) != now.get(name):
            was, is_ = (
                f"shape {list(shapes[name])}" if name in shapes else "no such parameter" for shapes in (before, now)
            )
            raise ValueError(
                f"{what} is over other parameters: {name} has {is_} here and {was} there. Choose the subspace "
                f"({posterior.config.subspace!r}) and the adapter that it was made with"
            )
    if list(before) != list(now):
        raise ValueError(f"{what} holds the same parameters in another order: {list(before)[:3]}, here {list(now)[:3]}")
    if posterior.config.task != model.task:
        raise ValueError(f"{what} is for {posterior.config.task}, this model for {model.task}")
    old, new = posterior.adapter_config or {}, base_model.adapter_config(model.model) or {}
    for key in _SCALING:
        if old.get(key) != new.get(key):
            raise ValueError(
                f"{what} has {key}={old.get(key)!r}, this adapter {new.get(key)!r}: equal parameters would be other "
                "models. Use the same adapter config"
            )
