"""Posteriors as objects and as directories: configs, atomic storage, the Hub, and the model card."""
