"""The MAP estimate, and methods that collect or average the iterates of an optimiser.

They are the baselines that a posterior must improve on: ensembles, SGD iterates, SWA, SWAG and MC dropout.
"""
