"""The methods and settings that ``tune`` compares. A method joins by one row of ``default_candidates``."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.layout import Layout
from hf_bayes.methods.recommended import LEAST_UPDATES, on_ladder
from hf_bayes.methods.registry import METHODS
from hf_bayes.models.base import BayesianModel

PLAIN = "plain fine-tuning"
"""The rival of every other candidate: one set of weights, with a temperature."""


MOST_LINEARISED = 32
"""The largest number of classes of the linearised candidate. It takes a backward pass for each class and row: with 150
classes its predictions cost more than the training of all other candidates."""


class Candidate(NamedTuple):
    """A method with its settings.

    Attributes:
        name: its name in the table, unique.
        method: the config.
        learning_rate: the learning rate of the trainer; None leaves it to the method.
        cost: the number of forward passes of a prediction, by which ties are broken.
        least_updates: the smallest number of updates of a run.
    """

    name: str
    method: MethodConfig
    learning_rate: float | None = None
    cost: int = 1
    least_updates: int = 1

    @property
    def gradients_per_update(self) -> int | Fraction:
        """The minibatch gradients of an update without accumulation, of all chains, as a mean over updates."""
        return self.method.num_chains * self.method.requirements.gradients_per_update


def default_candidates(model: BayesianModel, *, num_chains: int = 4, draws_per_chain: int = 4) -> tuple[Candidate, ...]:
    """Return the candidates for an attached model.

    Args:
        model: only LoRA has dropout to sample, and factors of which one is random.
        num_chains: the number of chains of every method.
        draws_per_chain: the number of draws that a sampler keeps of each chain.
    """
    members = num_chains * draws_per_chain
    draws = {"num_chains": num_chains, "draws_per_chain": draws_per_chain}
    ladder = replace(on_ladder(), num_chains=num_chains, draws_per_chain=draws_per_chain)
    found = [
        Candidate(PLAIN, _config("map"), None, 1),
        Candidate("deep ensemble", _config("ensemble", num_chains=num_chains), None, num_chains),
        # one gradient an update: trials are short. With 300 gradients of a chain, half as many updates of pairs raise
        # the NLL by .194 +- .012 nats on CLINC150 and .014 +- .004 on Debian sections (recommend.py, one seed)
        Candidate("mean-field VI", _config("mean_field", num_chains=num_chains, num_draws=1), None, 10),
        # at T = 1 and with few rows, the optimum of q predicts worse than a mode (docs/results/cold_variational.md)
        Candidate("IVON, T = 0.01", _config("ivon", num_chains=num_chains, temperature=0.01), None, 10),
        Candidate("SGHMC", _config("sghmc", **draws), None, members),
        Candidate("SGHMC, ladder", ladder, None, members, least_updates=LEAST_UPDATES),
    ]
    found += [
        Candidate("SWA", _config("swa"), None, 1),
        Candidate("SWAG", _config("swag"), None, 10),
        Candidate(f"SWAG, {num_chains} chains", _config("swag", num_chains=num_chains), None, 10),
    ]
    if _num_outputs(model) <= MOST_LINEARISED:
        # a likelihood that cannot draw labels has no sampled GGN
        estimator = "ef_sequence" if "draw" in model.likelihood.lacks else "ggn"
        # a search by held-out rows judges draws of the Gaussian, and this candidate predicts without any: the evidence
        # chooses the prior, and held-out rows the temperature
        laplace = _config("laplace", structure="kronecker", fit_prior="evidence", estimator=estimator)
        found.append(Candidate("Laplace, linearised", laplace, None, 3))
    if _has_lora(model.layout):
        dropout = _config("mc_dropout", num_chains=num_chains, dropout=0.1, num_masks=draws_per_chain)
        found.append(Candidate("MC dropout", dropout, None, members))
        found.append(Candidate("BLoB", _config("blob", num_chains=num_chains), None, 10))
        found.append(Candidate("training-free", _config("training_free"), None, 10))
    return tuple(found)


def _config(method: str, **settings: Any) -> MethodConfig:
    return METHODS[method](**settings)


def _num_outputs(model: BayesianModel) -> int:
    """Return the number of classes; 0 for a language model, whose Laplace approximation predicts by members."""
    return model.num_outputs if model.linearises else 0


def _has_lora(layout: Layout) -> bool:
    return any(".lora_A." in name for name in layout.names)
