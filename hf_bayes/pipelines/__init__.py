"""Pipelines of transformers whose records carry uncertainty, and how these records are shown.

``factory.pipeline`` makes them; ``registration`` makes them known to ``transformers.pipeline``.
"""
