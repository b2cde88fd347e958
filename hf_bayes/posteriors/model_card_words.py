"""The explanations of a model card: full names of methods, and what each figure means and which values are good."""

from __future__ import annotations

METHODS = {
    "agps": "adaptive Gaussian-proposal sampling",
    "baoab": "Langevin dynamics with the BAOAB splitting",
    "ensemble": "a deep ensemble",
    "gps": "Gaussian-proposal sampling",
    "hmc": "Hamiltonian Monte Carlo",
    "laplace": "the Laplace approximation",
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
    "swag": "a Gaussian through iterates of SGD (SWAG)",
}
"""A method's name -> the field's name for it."""

DIAGNOSTICS = {
    "acceptance": "Share of proposals that each chain accepted. Good: 0.1 to 0.99.",
    "beyond_series": "Share of moves whose minibatch noise was too large to be corrected. Good: 0.01 or less.",
    "capped": "Share of coordinates whose proposal is as wide as its cap. Good: 0.05 or less.",
    "configurational_temperature": "Temperature of the positions of each chain. Good: within a factor of 2 of T.",
    "dim": "Number of random parameters.",
    "distance": "How far each chain moved from its start, in prior standard deviations. Good: clearly above 0.0001.",
    "distance_in_noise": "Distance moved over the one that the sampler's noise alone covers. For information.",
    "divergences": "Trajectories with energies that are not finite, in each chain. Good: 0.",
    "ess": "Effective number of independent values of the log-likelihood, all chains together. Good: 50 per chain.",
    "ess_logits": "Effective number of values of single logits (5 % quantile). Good: 50 per chain.",
    "ess_terms": "Effective number of values of single labels' probabilities (5 % quantile). Good: 50 per chain.",
    "kinetic_inside": "Share of tensors whose momenta are within their 99 % interval, update by update. Good: 0.99.",
    "kinetic_share": "Share of tensors whose momenta have their temperature on average. Good: 0.99 or more.",
    "kinetic_temperature": "Temperature of the momenta of each chain. Good: kinetic_temperature_law.",
    "kinetic_temperature_law": "The kinetic temperature that the discretised sampler has in theory.",
    "noise_ratio": "Variance of the sampler's noise over that of minibatch gradients. Good: well above 1.",
    "num_chains": "Number of chains.",
    "num_logits": "Number of logits that were watched.",
    "num_moves": "Proposals of a chain after burn-in.",
    "num_tensors": "Number of random tensors.",
    "num_terms": "Number of training labels that were watched.",
    "num_values": "Values of each chain that R-hat and ESS are computed from.",
    "penalty": "Mean correction for minibatch noise in the acceptance, in units of its logarithm. Good: below 1.",
    "ramped": "Whether the temperature rose from 0 in each cycle.",
    "rhat": "Disagreement of chains about the log-likelihood (R-hat). Good: 1.05 or less.",
    "rhat_logits": "Disagreement of chains about single logits (95 % quantile of R-hat). Good: 1.05 or less.",
    "rhat_terms": "Disagreement of chains about single labels (95 % quantile of R-hat). Good: 1.05 or less.",
    "strayed": "Prior density lost by each chain, over what the data can repay, in nats. Good: below 10.",
    "temperature": "T, the temperature that is sampled at; 1 is the Bayes posterior.",
    "unmoved": "Share of weights that the first update left as they were, by rounding. Good: 0.01 or less.",
    "values": "What R-hat and ESS are computed from.",
    "laplace.below_noise": "Figures that the rows looked at cannot distinguish from 0.",
    "laplace.diagonal": "Number of tensors of which only the diagonal of the covariance is kept.",
    "laplace.displacement": "Distance to the Gaussian's own maximum, in its standard deviations. Good: below 1.",
    "laplace.gradient_norm": "Norm of the gradient of the log posterior at the mean. Good: near 0.",
    "laplace.gradient_rows": "Rows that the gradient was computed from.",
    "laplace.log_evidence": "Log marginal likelihood in nats. Higher is better, for the same data.",
    "laplace.log_lik": "Log-likelihood of the training data at the mean, in nats.",
    "laplace.prior_precision": "Precision of the prior that was fitted: 1 / std^2.",
}
"""A diagnostic -> what it means and what is good."""

METRICS = {
    "accuracy": "Share of labels that are the most probable class. Higher is better.",
    "ace": "Mean distance of the coverage of prediction intervals from what they promise. Good: near 0.",
    "aleatoric": "Mean entropy that each member by itself leaves open.",
    "brier": "Mean squared distance of the probabilities from the label. Lower is better.",
    "ece": "Expected calibration error: distance of confidence from accuracy. Good: near 0.",
    "epistemic": "Mean entropy that the members disagree about; 0 for one member.",
    "epistemic_std": "Mean standard deviation of the members' numbers.",
    "limit_nll": "NLL that infinitely many such members would have, extrapolated.",
    "limit_nll_std_error": "Standard error of limit_nll.",
    "map_nll": "NLL of a point estimate (MAP), for comparison. Good: nll is not above it.",
    "map_nll_difference_std_error": "Standard error of nll - map_nll. Differences below twice this mean nothing.",
    "member_nll": "Mean NLL of single members. The average of the members, nll, is never worse.",
    "mse": "Mean squared error of the predicted mean. Lower is better.",
    "nll": "Negative log-likelihood of the average of the members. Lower is better.",
    "perplexity": "exp(nll). Lower is better.",
    "predictive_std": "Mean predicted standard deviation, noise of the labels included.",
    "total": "Mean entropy of the predictions: aleatoric + epistemic.",
}
"""A held-out figure -> what it means and what is good."""


def explanation(words: dict[str, str], name: str) -> str:
    """Return the words for a figure, or "". A metric may have an eval set's name before it: "far_nll"."""
    known = [key for key in words if name == key or name.endswith(f"_{key}")]
    return words[max(known, key=len)] if known else ""
