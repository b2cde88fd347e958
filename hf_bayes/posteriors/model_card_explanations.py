"""The explanations in a model card: full names of methods, and the meaning and good values of each figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METHODS = {
    "agps": "adaptive Gaussian-proposal sampling",
    "blob": "Bayesian low-rank adaptation by backpropagation (BLoB)",
    "baoab": "Langevin dynamics with the BAOAB splitting",
    "ekf": "the extended Kalman filter",
    "ensemble": "a deep ensemble",
    "full_rank_vi": "full-rank Gaussian variational inference",
    "gps": "Gaussian-proposal sampling",
    "hmc": "Hamiltonian Monte Carlo",
    "ivon": "natural-gradient variational inference (IVON)",
    "laplace": "the Laplace approximation",
    "low_rank_vi": "low-rank Gaussian variational inference",
    "map": "maximum a posteriori, a point estimate",
    "mc_dropout": "Monte Carlo dropout",
    "mean_field": "mean-field variational inference",
    "metropolis": "random-walk Metropolis",
    "penalty": "minibatch Metropolis with the penalty method",
    "sgd_mc": "iterates of stochastic gradient descent",
    "sghmc": "stochastic-gradient Hamiltonian Monte Carlo",
    "sghmc_euler": "stochastic-gradient Hamiltonian Monte Carlo, Euler discretisation",
    "sgld": "stochastic-gradient Langevin dynamics",
    "sgnht": "the stochastic-gradient Nosé-Hoover thermostat",
    "snapshot": "a snapshot ensemble",
    "swa": "stochastic weight averaging, a point estimate",
    "swag": "a Gaussian through an optimiser's iterates (SWAG)",
    "training_free": "training-free Bayesianisation of a LoRA adapter",
}
"""The name of a method -> its full name in the literature."""

COVARIANCES = {
    "gaussian": "diagonal",
    "gaussian_full": "full: one matrix over all random parameters",
    "gaussian_kronecker": "Kronecker-factored (K-FAC): one block for each tensor",
    "gaussian_low_rank": "diagonal plus a few directions (low rank)",
}
"""The ``kind`` of a Gaussian -> its covariance in words."""

DIAGNOSTICS = {
    "acceptance": "Share of proposals that each chain accepted. Good: 0.1 to 0.99.",
    "beyond_series": "Share of moves whose minibatch noise was too large to be corrected. Good: 0.01 or less.",
    "capped": "Share of coordinates whose proposal is as wide as its cap. Good: 0.05 or less.",
    "chosen_temperature": "T that held-out rows chose for its predictions. The draws need not have converged then.",
    "configurational_temperature": "Temperature of the positions of each chain. Good: within a factor of 2 of T.",
    "dim": "Number of random parameters.",
    "distance": "Distance of each chain from its start, in prior standard deviations. Good: clearly above 0.0001.",
    "distance_in_noise": "Distance moved, divided by the distance that noise alone covers. For information.",
    "divergences": "Number of trajectories of each chain whose energy is not finite. Good: 0.",
    "epistemic_drift": "Change of epistemic uncertainty when draws move by the exact energy. Good: 0.83 to 1.2.",
    "epistemic_size": "Size of epistemic uncertainty, by informed_spread: right, too large or too small.",
    "ess": "Effective number of independent values of the log-likelihood, all chains together. Good: 100.",
    "ess_logits": "Effective number of values of single logits (5 % quantile). Good: 100.",
    "ess_terms": "Effective number of values of single labels' probabilities (5 % quantile). Good: 100.",
    "heating": "Share of T that minibatches were allowed to add where the data outweigh the prior. For information.",
    "kinetic_inside": "Share of tensors whose momenta are within their 99 % interval, update by update. Good: 0.99.",
    "kinetic_share": "Share of tensors whose momenta have the right temperature on average. Good: 0.99 or more.",
    "kinetic_temperature": "Temperature of the momenta of each chain. Good: kinetic_temperature_law.",
    "kinetic_temperature_law": "Theoretical kinetic temperature of the discretised sampler.",
    "kinetic_temperature_informed": "The same where the data outweigh the prior. Good: kinetic_temperature_law.",
    "kind": "Kind of result: chains of a sampler, a Gaussian, or optima, which are no draws.",
    "ladder_drawn_at": "T at each draw of a chain.",
    "ladder_lost": "Whether a chain predicted badly at every T, and went back to the end of its warm start.",
    "ladder_nll": "NLL of held-out rows at each T of the ladder, when one was chosen. Lower is better.",
    "ladder_prior_scale": "Factor of the prior's standard deviations at each T of the ladder.",
    "ladder_temperature": "Each T that the ladder tried.",
    "mirrored": "Whether every second chain had minus the noise of the chain before it. Such a pair counts as one.",
    "noise_ratio": "Variance of the sampler's noise over the variance of minibatch gradients. Good: well above 1.",
    "noise_std_of_run": "Noise of the labels during the run. Predictions use noise_std, which fits held-out rows.",
    "num_chains": "Number of chains.",
    "num_draws_before_stop": "Number of draws of a chain until the run was stopped. If it is 0, there are no draws.",
    "num_logits": "Number of recorded logits.",
    "num_moves": "Number of proposals of a chain after burn-in.",
    "num_planned_updates": "Number of updates that the run would have made without the stop.",
    "num_tensors": "Number of random tensors.",
    "num_terms": "Number of recorded training labels.",
    "num_values": "Number of values of each chain behind R-hat and ESS.",
    "penalty": "Mean correction for minibatch noise in the log acceptance probability. Good: below 1.",
    "ramped": "Whether the temperature rose from 0 in each cycle.",
    "rhat": "Difference between chains in the log-likelihood (R-hat). Good: 1.05 or less.",
    "rhat_logits": "Difference between chains in single logits (95 % quantile of R-hat). Good: 1.05 or less.",
    "rhat_terms": "Difference between chains in single labels (95 % quantile of R-hat). Good: 1.05 or less.",
    "informed_spread": "Temperature of the positions where the data outweigh the prior. Good: within 15 % of T.",
    "informed_spread_std_error": "Standard error of informed_spread.",
    "prior_loss_ratio": "Loss of log prior density of each chain over what data and T can explain. Good: below 10.",
    "stopped_at": "Number of updates after which the run was stopped, before its end.",
    "temperature": "Temperature T of the sampled distribution. 1 is the Bayes posterior.",
    "unmoved": "Share of weights that rounding kept unchanged in the first update. Good: 0.01 or less.",
    "values": "Quantity behind R-hat and ESS.",
    "laplace.below_noise": "Figures that cannot be distinguished from 0 with the rows in use.",
    "laplace.diagonal": "Number of tensors with a diagonal covariance only.",
    "laplace.displacement": "Distance of the mean from the maximum, in standard deviations. Good: below 1.",
    "laplace.gradient_norm": "Norm of the gradient of the log posterior at the mean. Good: near 0.",
    "laplace.gradient_rows": "Number of rows behind the gradient.",
    "laplace.log_evidence": "Log marginal likelihood in nats. Higher is better, for the same data.",
    "laplace.log_lik": "Log-likelihood of the training data at the mean, in nats.",
    "laplace.prior_precision": "Precision of the fitted prior: 1 / std^2.",
    "training_free.difference": "Held-out loss of the members, minus the loss of the weights alone, at the scale.",
    "training_free.loss": "Held-out loss of the weights alone, in nats per likelihood term.",
    "training_free.num_passes": "Number of passes over the held-out rows that determined the scale.",
    "training_free.passes": "Whether the difference is within the tolerance of the method.",
    "training_free.rows": "Number of held-out rows that determined the scale.",
    "training_free.scale": "Standard deviation of the noise, in directions in which B is orthonormal.",
    "training_free.scales": "Number of layers with a scale of their own.",
    "training_free.std_error": "Standard error of training_free.difference, paired by row.",
    "training_free.too_wide": "Smallest scale that was tried and is not within the tolerance.",
}
"""The name of a diagnostic -> its meaning and its good values."""

METRICS = {
    "accuracy": "Share of labels that are the most probable class. Higher is better.",
    "ace": "Mean difference between the coverage of prediction intervals and their nominal level. Good: near 0.",
    "aleatoric": "Mean entropy of the predictions of single members.",
    "brier": "Mean squared difference between probabilities and label. Lower is better.",
    "ece": "Expected calibration error: mean difference between confidence and accuracy. Good: near 0.",
    "epistemic": "Mean entropy from the differences between members. It is 0 for one member.",
    "epistemic_std": "Mean standard deviation of the members' numbers.",
    "limit_nll": "NLL of infinitely many such members, by extrapolation.",
    "limit_nll_std_error": "Standard error of limit_nll.",
    "map_nll": "NLL of a point estimate (MAP), for comparison. Good: nll is not above it.",
    "map_nll_difference_std_error": "Standard error of nll - map_nll. A difference is significant above twice this.",
    "member_nll": "Mean NLL of single members. The NLL of their average, nll, is never worse.",
    "mse": "Mean squared error of the predicted mean. Lower is better.",
    "nll": "NLL of the members' average, at the temperature of the mixture if one is stored. Lower is better.",
    "perplexity": "exp(nll) of a language model, per token. Lower is better.",
    "predictive_std": "Mean predicted standard deviation, noise of the labels included.",
    "total": "Mean entropy of the predictions: aleatoric + epistemic.",
}
"""The name of a held-out figure -> its meaning and its good values."""


def awaits_temperature(method: Mapping[str, Any]) -> bool:
    """Return whether held-out rows were to choose T from a ladder, and the run was stopped before they did."""
    ladder = method.get("ladder")
    return isinstance(ladder, Mapping) and "temperature" in ladder


def explanation(words: dict[str, str], name: str) -> str:
    """Return the explanation of a figure, or "". The name of an eval set may precede a metric, as in "far_nll"."""
    known = [key for key in words if name == key or name.endswith(f"_{key}")]
    return words[max(known, key=len)] if known else ""
