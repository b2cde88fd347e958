"""Rows of the data by number, for a method that passes over the data once more."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hf_bayes.core.rng import generator
from hf_bayes.objectives.curvature_pass import Batches


class DataAccess(NamedTuple):
    """Rows by number.

    Attributes:
        batches: numbers of training rows -> these rows, in this order, in batches.
        num_rows: the number of training rows.
        heldout: the same for held-out rows; None if there are none.
        num_heldout: the number of held-out rows.
        hide: True shows no progress bar; None shows one only on a terminal.
    """

    batches: Batches
    num_rows: int
    heldout: Batches | None = None
    num_heldout: int = 0
    hide: bool | None = None

    def part(self, share: float, seed: int) -> DataAccess:
        """Return access to a random part of the training rows, always the same one for a seed."""
        if share >= 1:
            return self
        number = max(1, math.ceil(share * self.num_rows))
        order = torch.randperm(self.num_rows, generator=generator(seed, "part of the rows"))[:number].tolist()
        return self._replace(batches=lambda rows: self.batches([order[row] for row in rows]), num_rows=number)
