"""Chains: ``Run``, the owner of their states and draws, and ``hf_bayes.sample`` for an energy of your own.

``run`` advances chains on an ``Objective``: an energy here, or a model (``objectives.model_objective``). ``sampling``
defines ``sample``, and most other modules check and prepare its arguments. Runs on a model also use ``own_settings``
and ``starting_points``.
"""
