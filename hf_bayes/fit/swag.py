"""``fit_swag``: draws of any method -> SWAG's Gaussian through them, with no data and no training."""

from __future__ import annotations

from typing import Any

from hf_bayes.distributions.approximations import Draws, joined
from hf_bayes.methods.registry import METHODS
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.prediction_fits import with_approximation


def fit_swag(posterior: Posterior, *, rank: int = 20) -> Posterior:
    """Return a posterior with the SWAG Gaussian through the draws of each chain, in place of the draws.

    Several chains give a mixture with one Gaussian for each. The new posterior saves, loads and predicts like a
    posterior of ``SWAGConfig``. Its ``method`` entry contains the method of the draws. The diagnostics of the chains
    stay. Held-out figures are left out, because they belong to the draws, and so are all fits to their predictions: a
    temperature, a student and a threshold.

    Args:
        posterior: draws [M, d] in the order in which they were made, 2 or more of each chain.
        rank: K, the number of the last deviations from the mean that the covariance keeps.
    Returns:
        A posterior whose approximation is a ``Gaussian`` with means [chains, d] and low-rank covariances.
    Raises:
        ValueError: for a posterior without draws, a chain with fewer than 2 draws, or a rank below 2.
    """
    if not isinstance(posterior, Posterior):
        raise ValueError(f"fit_swag takes a Posterior, as of Posterior.from_pretrained(...); got {posterior!r:.100}")
    draws, config = posterior.approximation, posterior.config
    if not isinstance(draws, Draws):
        raise ValueError(f"fit_swag needs a posterior of draws, got one of {draws.kind}: it has its Gaussian already")
    chains = {int(chain): draws.theta[draws.chain == chain] for chain in draws.chain.unique()}
    short = {chain: len(theta) for chain, theta in chains.items() if len(theta) < 2}
    if short:
        raise ValueError(
            f"fit_swag needs 2 draws or more of each chain, better many, got {short} (chain: draws): sample with a "
            "larger draws_per_chain"
        )
    swag: Any = METHODS["swag"]
    gaussian = joined([swag(rank=rank).through(theta) for theta in chains.values()])
    of_draws = config.diagnostics.get("verdict") or "not assessed"
    verdict = (
        f"SWAG through {len(draws.theta)} draws of {config.method['name']} (chains: {len(chains)}), itself not "
        f"assessed; the draws: {of_draws}"
    )
    method = {"name": "swag", "rank": rank, "num_chains": len(chains), "draws": config.method}
    return with_approximation(
        posterior, gaussian, method=method, diagnostics={**config.diagnostics, "verdict": verdict}
    )
