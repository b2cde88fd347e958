"""``BayesianTrainer``: a transformers Trainer that ends in a posterior.

``trainer`` overrides hooks of Trainer, and each override delegates to another module. ``setup`` and ``session`` prepare
a run. ``rows`` chooses the rows of each chain, and ``active_run`` advances the chains. ``monitor`` and ``diagnosis``
observe them, ``checkpoints`` and ``resuming`` save and restore them, and ``outcome`` writes the posterior.
"""
