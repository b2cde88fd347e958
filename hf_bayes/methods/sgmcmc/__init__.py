"""Stochastic-gradient samplers: one gradient per update."""
