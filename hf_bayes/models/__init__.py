"""Bayesian versions of transformers models: attach and load them, predict, and generate with uncertainty."""
