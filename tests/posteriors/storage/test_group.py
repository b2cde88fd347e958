from __future__ import annotations

import threading
from typing import Any

import pytest

from hf_bayes.posteriors.storage import seal

FORMAT, FILE = "test.sealed", "seal.json"


class Pair:
    """A group of two threads in place of two processes."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.num_processes, self.barrier, self.values = rank, 2, barrier, values

    def share(self, value: Any) -> list[Any]:
        self.values[self.rank] = value
        self.barrier.wait(10)
        found = list(self.values)
        self.barrier.wait(10)
        return found


@pytest.mark.parametrize("missing", [False, True], ids=["whole", "a file is missing"])
def test_all_processes_learn_of_a_seal_that_failed(tmp_path, missing):
    barrier, values, errors = threading.Barrier(2), [None, None], [None, None]
    if not missing:
        (tmp_path / "a.pt").write_bytes(b"one")

    def one(rank: int) -> None:
        try:
            seal(tmp_path, ["a.pt"], file=FILE, format=FORMAT, group=Pair(rank, barrier, values))
        except OSError as error:
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [error is not None for error in errors] == [missing, missing]
    assert (tmp_path / FILE).exists() is not missing
