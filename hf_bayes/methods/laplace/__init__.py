"""The Laplace approximation: a Gaussian around a MAP estimate, from the curvature of the log-likelihood.

Estimators (what is differentiated) and structures (which part of the matrix is kept) of the curvature vary
independently. ``laplace`` is the method, and ``evidence`` and ``heldout_prior`` fit the precision of its prior.
"""
