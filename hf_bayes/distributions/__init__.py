"""Priors, energies, and posterior approximations (``Draws`` and ``Gaussian``) with their covariances."""
