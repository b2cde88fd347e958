"""Posteriors of models that are already trained: Laplace, SWAG, MC dropout; students; prior predictive checks."""
