"""``fit_mc_dropout``: an adapter that was trained with dropout -> a posterior, with no data and no training."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import require_seed, seed_of
from hf_bayes.distributions.approximations import Draws
from hf_bayes.fit.finished_models import config_for, model_to_fit
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.loading.base_model import config_of_adapter
from hf_bayes.models.to_posterior import to_posterior
from hf_bayes.posteriors.hub import is_place
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.uncertainty.custom.base import LikelihoodConfig


def fit_mc_dropout(
    model: PreTrainedModel | PeftModel,
    method: MethodConfig | None = None,
    *,
    subspace: str = "trainable",
    num_data: float | None = None,
    data_unit: str = "token",
    noise_std: float | None = None,
    likelihood: LikelihoodConfig | None = None,
    tokenizer: Any = None,
    seed: int = 0,
) -> Posterior:
    """Return the MC dropout posterior of a model that is trained already.

    Its draws are the weights of the model under ``num_masks`` random masks. The model is given back as it was.

    Args:
        model: a model with a finished peft adapter, or any model whose weights ``method.targets`` names.
        method: an ``MCDropoutConfig``; None takes the ``lora_dropout`` that the adapter was trained with.
        subspace: the name of the parameters that are random, see ``hf_bayes.core.layout.select``.
        num_data: N of the data that it was trained on, to be stored; None if it is not known.
        data_unit: the unit of N, "token" or "sequence".
        noise_std: the standard deviation of a regression's noise, in units of the labels; other heads refuse it.
        likelihood: the likelihood of the labels, such as ``Poisson()`` (docs/likelihoods.md); None takes the one that
            belongs to the head's configuration.
        tokenizer: saved with the posterior, which stores its fingerprint.
        seed: the seed of the masks.
    Returns:
        A posterior with draws [num_masks, d].
    Raises:
        ValueError: for an adapter trained without dropout and no ``method``, or weights that have no inputs to drop.
    """
    if isinstance(model, BayesianModel) or is_place(model):
        raise ValueError(
            f"fit_mc_dropout takes a model of transformers or peft, got {type(model).__name__}: its dropout is that of "
            "training, which a posterior does not have. Load the base model, and the adapter on it with peft"
        )
    default = {"dropout": _trained_with(model)} if method is None else {}
    config = config_for("mc_dropout", method, **default)
    require_seed(seed)
    with model_to_fit(
        model, subspace, noise_std, likelihood, method=config, tokenizer=tokenizer
    ) as (bayesian, subspace):  # fmt: skip
        layout, theta = bayesian.layout, bayesian.current.detach().cpu()
        masks = config.masks(layout.named_shapes)
        verdict = f"dropout of {config.dropout:g} around given weights: not assessed"
        return to_posterior(
            bayesian,
            Draws.from_chains(config.members(theta, masks, [seed_of(seed, "mc_dropout")])),
            config,
            subspace=subspace,
            num_data=num_data,
            data_unit=data_unit,
            tokenizer=tokenizer,
            seed=seed,
            diagnostics={"converged": None, "verdict": verdict},
        )


def _trained_with(model: PreTrainedModel | PeftModel) -> float:
    rate = float(getattr(config_of_adapter(model), "lora_dropout", 0.0))
    if rate == 0:
        raise ValueError(
            "the model has no adapter that was trained with lora_dropout > 0: MC dropout means the dropout of "
            "training. Pass method=MCDropoutConfig(dropout=...) with its rate"
        )
    return rate
