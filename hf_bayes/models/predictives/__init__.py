"""Posterior predictive distributions, of the likelihoods that are built in and of a user's own."""
