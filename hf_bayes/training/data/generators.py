"""Rows that are read outside of updates, without a change of the random numbers of later updates.

The probe, checks and fits on held-out rows read such rows. A resumed run must read the same ones, although the
generators from which its data set and collator draw have other states.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_bayes.core.rng import seed_of

_WRAPPING = ("dataset", "data_collator", "collate")
"""Attributes under which data sets and collators, also those of this package, hold what they wrap."""


@contextmanager
def seeded(seed: int, *holders: Any) -> Iterator[None]:
    """Seed all generators for the block, and put them back at its end, as ``undisturbed`` does.

    Args:
        seed: the seed of the generators of Python, NumPy and torch (of the CPU), and of those that ``holders`` hold.
        holders: a data set, a collator, as for ``undisturbed``.
    """
    with undisturbed(*holders):
        seed_all(seed)
        for holder in _with_wrapped(holders):
            for value in vars(holder).values():
                _seed(value, seed)
        yield


def seeded_batches(batches: Iterator[Any], seed: int, *holders: Any) -> Iterator[Any]:
    """Yield batches, each of which is read in ``seeded`` with a seed of its own; between them nothing is changed.

    Args:
        batches: reads rows when the next batch is asked for.
        seed: the first part of the key of each seed; the other part is the number of the batch.
        holders: a data set, a collator, as for ``undisturbed``.
    """
    for number in itertools.count():
        with seeded(seed_of(seed, "batch by number", number), *holders):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch. Generators of other devices stay as they are."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed devices too, which are not put back


@contextmanager
def undisturbed(*holders: Any) -> Iterator[None]:
    """Put all generators back at the end of the block: the global ones, and those that ``holders`` hold.

    Args:
        holders: a data set, a collator; what they wrap (``_WRAPPING``) is put back, too.
    """
    python, numpy_ = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with ExitStack() as after, torch.random.fork_rng(devices=devices):
        after.callback(np.random.set_state, numpy_)
        after.callback(random.setstate, python)
        for holder in _with_wrapped(holders):
            after.callback(_put_back, holder, dict(vars(holder)), _generator_states(holder))
        yield


def _with_wrapped(holders: Iterable[Any]) -> list[Any]:
    """Return the objects that have attributes of their own, and the objects that they wrap."""
    found: list[Any] = []
    waiting = list(holders)
    while waiting:
        holder = waiting.pop()
        if not hasattr(holder, "__dict__") or isinstance(holder, type) or any(holder is other for other in found):
            continue
        found.append(holder)
        waiting += [vars(holder)[name] for name in _WRAPPING if name in vars(holder)]
        waiting += [getattr(holder, name) for name in ("__self__", "func") if hasattr(holder, name)]
    return found


def _seed(value: Any, seed: int) -> None:
    """Seed a generator; leave any other value as it is."""
    match value:
        case torch.Generator():
            value.manual_seed(seed)
        case np.random.RandomState():
            value.seed(seed % 2**32)
        case random.Random():
            value.seed(seed)
        case np.random.Generator():
            value.bit_generator.state = type(value.bit_generator)(seed).state


def _generator_states(holder: Any) -> list[Callable[[], Any]]:
    """Return, for every generator among the attributes, a function that puts its state back."""
    restore: list[Callable[[], Any]] = []
    for value in vars(holder).values():
        match value:
            case torch.Generator():
                restore.append(partial(value.set_state, value.get_state()))
            case np.random.RandomState():
                restore.append(partial(value.set_state, value.get_state()))
            case random.Random():
                restore.append(partial(value.setstate, value.getstate()))
            case np.random.Generator():
                restore.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
    return restore


def _put_back(holder: Any, attributes: dict[str, Any], restore: list[Callable[[], Any]]) -> None:
    for name in vars(holder).keys() - attributes.keys():
        del vars(holder)[name]  # a frozen dataclass has no delattr
    vars(holder).update(attributes)
    for each in restore:
        each()
