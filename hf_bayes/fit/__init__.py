"""Posteriors of models that are already trained: Laplace, SWAG, MC dropout, distillation, and prior predictive checks."""
