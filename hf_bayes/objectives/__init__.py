"""The objective of a model with its data: log-likelihood and gradient on rows, held-out scores, and curvature.

``model_objective.ModelObjective`` is the object that a run calls, and ``starting.start_run`` makes such a run. The
other modules choose and count rows, compute curvature, and measure runs.
"""
