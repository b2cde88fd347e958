"""Probability distributions over theta: priors, energies, and posterior approximations with their covariances.

A run ends in one of two approximations, ``Draws`` or ``Gaussian``. Everything works on matrices theta [M, d] of M
members; no module of this package needs a model, except to read the fan-in of its layers for a prior.
"""
