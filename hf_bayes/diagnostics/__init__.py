"""Diagnostics of a run: temperatures, R-hat, effective sample size, distances, and a verdict in words.

``temperatures``, ``convergence`` and ``plausibility`` compute the numbers, ``measurements`` holds them, and ``verdict``
turns them into words. ``comparison`` and ``ensemble_limit`` are about held-out predictions.
"""
