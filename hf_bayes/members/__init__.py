"""The member axis in a live transformers model: stacked modules, folding, one trunk for all members."""

from hf_bayes.members.engine import FOLDED_ROWS, Members

__all__ = ["FOLDED_ROWS", "Members"]
