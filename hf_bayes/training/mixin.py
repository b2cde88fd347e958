"""The base of the trainer's mixins: put before any Trainer, each finds that one's methods and attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Trainer as AnyTrainer
else:  # whichever follows in the order of resolution: TRL's, a user's own
    AnyTrainer = object
