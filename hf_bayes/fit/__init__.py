"""Posteriors of models that are already trained: Laplace, SWAG, MC dropout, and prior predictive checks."""
