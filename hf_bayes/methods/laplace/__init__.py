"""Laplace approximations: curvature of the likelihood by estimator and structure, evidence, and the method itself."""
