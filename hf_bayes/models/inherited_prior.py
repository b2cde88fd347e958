"""A posterior as the prior of the next run: learning one data set after another (posteriors section 5.2).

    p(theta | D_1, D_2) ~ p(D_2 | theta) p(theta | D_1)

is exact; what is inherited is one Gaussian, the last posterior's (Huszar 2018), not one for each data set before it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hf_bayes.core.config import MethodConfig
from hf_bayes.distributions.approximations import Draws, Gaussian, single
from hf_bayes.models import base_model
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.loading import check_tokenizer
from hf_bayes.posteriors.posterior import Posterior

logger = logging.getLogger(__name__)

_SCALING = ("lora_alpha", "use_rslora", "alpha_pattern", "use_dora", "fan_in_fan_out")
"""Fields of a LoRA that decide what a theta means; the others show in names and shapes."""


class Inherited(NamedTuple):
    """A prior that was a posterior.

    Attributes:
        gaussian: of one component.
        record: where it came from, JSON-ready: what the next posterior says of its prior.
        posterior: itself.
    """

    gaussian: Gaussian
    record: dict[str, Any]
    posterior: Posterior

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse the tokenizer of the next run if it is another one; warn if there is none to compare.

        Raises:
            ValueError: if it is not the one that the prior was made with.
        """
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            check_tokenizer(self.posterior, tokenizer)
            return
        expected = self.posterior.config.base_model["fingerprint"]["tokenizer"]
        if expected is not None:
            logger.warning(
                "the prior (%s) was made with a tokenizer (fingerprint %s), and this run was given none to compare: "
                "with another one the same ids are other words, and nobody would notice. Give processing_class= to a "
                "trainer, tokenizer= to fit_laplace",
                self.record["posterior"] or self.record["method"], expected[:12],
            )  # fmt: skip


def inherit(
    prior: str | os.PathLike[str] | Posterior,
    model: BayesianModel,
    method: MethodConfig,
    *,
    data_unit: str,
) -> Inherited:
    """The prior that ``prior`` makes for the random parameters of ``model``.

    Draws, and mixtures of Gaussians, become the diagonal Gaussian of their moments.

    Args:
        prior: a posterior, its directory or its Hub id.
        data_unit: what N counts now.
    Raises:
        ValueError: if the posterior belongs to another base model, subspace or unit of the data, or the method's config
            says another prior. (Tokenizers: ``Inherited.check_tokenizer``.)
    """
    posterior = prior if isinstance(prior, Posterior) else Posterior.from_pretrained(prior)
    source = posterior.config.method["name"] if isinstance(prior, Posterior) else str(prior)
    what = f"prior ({source})"
    if method.prior_std is not None or method.prior_mean != "zero" or method.prior != "gaussian":
        raise ValueError(
            f"{method.name}: prior={method.prior!r}, prior_std={method.prior_std!r}, prior_mean={method.prior_mean!r} "
            "and another posterior are two priors: that one has its own mean and covariance. Leave these fields out"
        )
    _check_subspace(posterior, model, what)
    problems = base_model.differences(
        posterior.config.base_model, base_model.describe(model.model, model.core, model.layout)
    )
    if problems:
        raise ValueError(f"{what} belongs to another base model: this one has {'; '.join(problems)}")
    # a head's rows are its labels': in another order the prior of one would be what was learnt of another
    if problems := base_model.output_differences(posterior.config.head, model.core.config):
        raise ValueError(
            f"{what} is of a head whose outputs stand for something else: this model's config has "
            f"{'; '.join(problems)}. Give it the labels (id2label, label2id) and the problem_type of the earlier run"
        )
    unit = posterior.config.data_unit
    if unit in ("token", "sequence") and unit != data_unit:
        raise ValueError(
            f"{what} counts each {unit} as a datum, this run each {data_unit}: their precisions are on two scales. Set "
            f"data_unit={unit!r}"
        )
    approximation = posterior.approximation
    try:
        gaussian = single(approximation)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    if isinstance(approximation, Draws) and posterior.adapter_config and len(approximation.chain.unique()) > 1:
        logger.warning(
            "%s is fitted to draws of several chains: their LoRA factors need not agree, and a mean over different A "
            "and B is no model of any. A Gaussian posterior, or draws of one chain, say more",
            what,
        )
    record = {
        "posterior": None if isinstance(prior, Posterior) else str(_absolute(prior)),
        "fingerprint": posterior.fingerprint,
        "method": posterior.config.method["name"],
        "approximation": approximation.kind,
        "used_as": gaussian.kind,
        "num_data": posterior.config.num_data,
        "prior": posterior.config.prior,
    }
    return Inherited(gaussian, record, posterior)


def _absolute(prior: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """A Hub id stays what it is."""
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
