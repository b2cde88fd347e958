"""The data side of a model's log-likelihood: rows, held-out scores, and curvature."""
