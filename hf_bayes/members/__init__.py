"""The member axis in a live transformers model: stacked modules, folded rows, and one trunk for all members.

``engine.Members`` gives a model M members in place. Random parameters get a member axis, frozen weights are shared, and
the layers before the first random one run once for all members. ``mesh`` divides chains and rows of data over several
processes, and ``member_sums`` averages the predictions of members that different processes hold. ``compat`` has
the private names of transformers, peft and other hosts that this package and the higher ones use.
"""

from hf_bayes.members.engine import FOLDED_ROWS, Members

__all__ = ["FOLDED_ROWS", "Members"]
