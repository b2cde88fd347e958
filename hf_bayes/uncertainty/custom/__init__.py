"""Likelihoods beside those of transformers' heads: the small interface for your own, and the built-in ones.

``base`` has the interface, ``adapted`` derives from it what training, curvature and predictions need, and ``registry``
finds a likelihood by the name in a saved posterior. Each built-in likelihood is one file.
"""
