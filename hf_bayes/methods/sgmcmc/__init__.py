"""Stochastic-gradient samplers: one gradient per update, from minibatches. Each file is one method.

``gradient_noise`` and ``preconditioner`` hold parts that several of them share.
"""
