"""Posteriors as objects, as directories, and on the Hub.

``posterior`` is the object and ``directory`` lists its files. ``storage`` writes and verifies any directory in one step.
The other modules describe parts of the directory: the config, LoRA adapters, sidecars such as the tokenizer, and the
model card.
"""
