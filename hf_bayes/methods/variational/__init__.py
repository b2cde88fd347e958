"""Variational inference: methods that fit a Gaussian to the posterior by its free energy, and the Kalman filter.

Each file of a method is one method, and each method ends in a Gaussian per chain. ``gaussian_vi``, ``factored`` and
``optimisers`` hold what several methods share.
"""
