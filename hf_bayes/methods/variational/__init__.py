"""Variational inference: methods that fit a distribution to the posterior by its free energy.

Each file is one method, and each method ends in a Gaussian per chain.
"""
