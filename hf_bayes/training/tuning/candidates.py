"""The methods and settings that ``tune`` compares. A method joins by one row of ``default_candidates``."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.layout import Layout
from hf_bayes.distributions.priors import lora_stds
from hf_bayes.methods.registry import METHODS
from hf_bayes.models.base import BayesianModel

PLAIN = "plain fine-tuning"
"""The rival of every other candidate: one set of weights, with a temperature."""

WIDE = 4.0
"""The standard deviation of the wider prior, in units of the default one."""


class Candidate(NamedTuple):
    """A method with its settings.

    Attributes:
        name: its name in the table, unique.
        method: the config.
        learning_rate: of the trainer; None leaves it to the method.
        cost: the number of forward passes of a prediction, by which ties are broken.
    """

    name: str
    method: MethodConfig
    learning_rate: float | None = None
    cost: int = 1


def default_candidates(model: BayesianModel, *, num_chains: int = 4, draws_per_chain: int = 4) -> tuple[Candidate, ...]:
    """Return the candidates for an attached model: each method under the default prior, and most under a wider one.

    Args:
        model: its LoRA layers decide on the default prior.
        num_chains: the number of chains of every method.
        draws_per_chain: the number of draws that a sampler keeps of each chain.
    """
    wide = wider_prior(model, WIDE)
    members = num_chains * draws_per_chain
    draws = {"num_chains": num_chains, "draws_per_chain": draws_per_chain}
    rows: dict[str, tuple[str, dict[str, Any], int]] = {
        PLAIN: ("map", {}, 1),
        "deep ensemble": ("ensemble", {"num_chains": num_chains}, num_chains),
        "mean-field VI": ("mean_field", {"num_chains": num_chains}, 10),
        "SGHMC": ("sghmc", draws, members),
        "SGHMC at T = 0.1": ("sghmc", {**draws, "temperature": 0.1}, members),
    }
    priors = {"": None} if wide is None else {"": None, ", wide prior": wide}
    found = [
        Candidate(name + words, _config(method, **settings, prior_std=stds), None, cost)
        for words, stds in priors.items()
        for name, (method, settings, cost) in rows.items()
    ]
    warm: dict[str, Any] = {"warm_start_learning_rate": 3e-3, "burn_in": 0.5}
    found += [
        Candidate(f"{name}, rate {rate:g}", _config(method, prior_std=wide, **warm), rate, cost)
        for name, method, cost in (("SWA", "swa", 1), ("SWAG", "swag", 10))
        for rate in (1e-2, 3e-2)
    ]
    laplace = _config("laplace", structure="kronecker", fit_prior="evidence")
    found.append(Candidate("Laplace, linearised", laplace, None, 3))
    if _has_lora(model.layout):
        dropout = _config("mc_dropout", num_chains=num_chains, dropout=0.1, num_masks=draws_per_chain, prior_std=wide)
        found.append(Candidate("MC dropout", dropout, None, members))
    return tuple(found)


def wider_prior(model: BayesianModel, factor: float) -> dict[str, float] | None:
    """Return a prior with ``factor`` times the default std of LoRA's B and of other tensors; None without LoRA.

    A keeps its scale: the effect of the product grows by the factor.
    """
    default = lora_stds(model.model, model.layout)
    if not default:
        return None
    return {
        f"^{re.escape(name)}$": default[name] if ".lora_A." in name else factor * default.get(name, 1.0)
        for name in model.layout.names
    }


def _config(method: str, **settings: Any) -> MethodConfig:
    return METHODS[method](**settings)


def _has_lora(layout: Layout) -> bool:
    return any(".lora_A." in name for name in layout.names)
