"""The methods, one file each, and the registry that finds them by name.

A method turns gradients of the log-likelihood into states and draws. It depends on no model and no trainer.
"""
