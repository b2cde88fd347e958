"""Records of one process of a launch: its first gradient, its messages, and the files that it writes."""

from __future__ import annotations

import os
import pickle
import sys
import unittest.mock
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hf_bayes.core.types import Evaluation
from hf_bayes.objectives.model_of_update import ModelOfUpdate

MOVES = ("all_reduce", "all_gather", "broadcast", "all_gather_object", "broadcast_object_list", "reduce", "gather",
         "all_to_all", "all_gather_into_tensor", "reduce_scatter_tensor", "gather_object", "scatter")  # fmt: skip


class FirstGradient:
    """Keeps the first gradient of a run."""

    value: Tensor | None = None

    @classmethod
    def watch(cls) -> None:
        evaluate = ModelOfUpdate.__call__

        def watched(self: ModelOfUpdate, *args: Any, **options: Any) -> Evaluation:
            evaluation = evaluate(self, *args, **options)
            if cls.value is None and evaluation.grad_log_lik is not None:
                cls.value = evaluation.grad_log_lik.clone()
            return evaluation

        ModelOfUpdate.__call__ = watched  # type: ignore[method-assign]


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Bytes that this process hands to torch.distributed while open: of all calls, and of the largest."""
    found = {"calls": 0, "bytes": 0, "largest": 0}

    def counted(move: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[1] if move.__name__.startswith(("all_gather", "all_to_all")) else args[0]
            size = given.nbytes if isinstance(given, Tensor) else len(pickle.dumps(given))
            found.update(calls=found["calls"] + 1, bytes=found["bytes"] + size, largest=max(found["largest"], size))
            return move(*args, **kwargs)

        return call

    with unittest.mock.patch.multiple(dist, **{name: counted(getattr(dist, name)) for name in MOVES}):
        yield found


class Writes:
    """Files under ``root`` that this process opens for writing: the first one's renames put all of them in force."""

    def __init__(self, root: Path) -> None:
        self.root, self.names = root, set[str]()
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if isinstance(args[0], (str, os.PathLike)) and Path(args[0]).is_relative_to(self.root):
            self.names.add(Path(args[0]).relative_to(self.root).as_posix())
