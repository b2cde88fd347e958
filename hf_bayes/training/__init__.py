"""``BayesianTrainer``: a transformers Trainer that ends in a posterior.

``trainer`` overrides hooks of Trainer, and each override delegates to another module. ``setup`` and ``session`` prepare
a run, and ``checks`` has what they refuse. ``data.rows`` chooses the rows of each chain, and ``active_run`` advances
the chains. ``reports.monitor`` and ``diagnosis`` observe them, ``checkpoints`` and ``resuming`` save and restore them.
``outcome`` makes the posterior, ``saving`` writes it, and ``pushing`` uploads it. ``tuning`` compares methods by short
runs.
"""
