"""Pipelines of transformers whose records carry uncertainty, and pictures of these records.

``factory.pipeline`` makes a pipeline from a saved posterior. ``registration`` registers our pipelines with
``transformers.pipeline``. ``rendering`` shows records in HTML or in a terminal.
"""
