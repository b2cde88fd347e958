"""Posteriors as objects, as directories, and on the Hub.

``posterior`` is the object, ``directory`` lists its files, and ``storage`` writes and verifies them in one step. The
other modules describe parts of the directory: the config, LoRA adapters, sidecars such as the tokenizer, and the model
card.
"""
