"""``fit_mc_dropout``: an adapter that was trained with dropout -> a posterior, with no data and no training."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import require_seed, seed_of
from hf_bayes.distributions.approximations import Draws
from hf_bayes.methods.registry import from_dict
from hf_bayes.models.attaching import attach, refuse_frozen_adapter
from hf_bayes.models.loading.base_model import config_of_adapter
from hf_bayes.models.loading.checkpoint_weights import warn_of_frozen_head
from hf_bayes.models.to_posterior import to_posterior
from hf_bayes.posteriors.posterior import Posterior


def fit_mc_dropout(
    model: PreTrainedModel | PeftModel,
    method: MethodConfig | None = None,
    *,
    subspace: str = "trainable",
    num_data: float | None = None,
    data_unit: str = "token",
    noise_std: float | None = None,
    tokenizer: Any = None,
    seed: int = 0,
) -> Posterior:
    """Return the MC dropout posterior of a model that is trained already.

    Its draws are the weights of the model under ``num_masks`` random masks. The model is given back as it was.

    Args:
        model: a model with a finished peft adapter, or any model whose weights ``method.targets`` names.
        method: an ``MCDropoutConfig``; None takes the ``lora_dropout`` that the adapter was trained with.
        subspace: see ``hf_bayes.core.layout.select``.
        num_data: N of the data that it was trained on, to be stored; None if it is not known.
        data_unit: the unit of N, "token" or "sequence".
        noise_std: the standard deviation of a regression's noise, in units of the labels; other heads refuse it.
        tokenizer: saved with the posterior, which stores its fingerprint.
        seed: the seed of the masks.
    Returns:
        A posterior with draws [num_masks, d].
    Raises:
        ValueError: for an adapter trained without dropout and no ``method``, or weights that have no inputs to drop.
    """
    config: Any = method or from_dict({"name": "mc_dropout", "dropout": _trained_with(model)})
    if getattr(config, "name", None) != "mc_dropout":
        raise ValueError(
            f"method must be an MCDropoutConfig, got {type(config).__name__}: other methods need a trainer"
        )
    require_seed(seed)
    with attach(model, subspace=subspace, noise_std=noise_std) as bayesian:
        refuse_frozen_adapter(bayesian)
        warn_of_frozen_head(bayesian.core, bayesian.layout)
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
