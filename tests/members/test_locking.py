from __future__ import annotations

import copy
import threading

from hf_bayes.members.locking import Turns


def is_free(turns: Turns) -> bool:
    """Return whether another thread could take the lock at once."""
    found: list[bool] = []

    def ask() -> None:
        found.append(turns._lock.acquire(blocking=False))
        if found[0]:
            turns._lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_may_enter_again_and_others_wait() -> None:
    turns = Turns()
    with turns:
        with turns:
            assert not is_free(turns)
        assert not is_free(turns)
    assert is_free(turns)


def test_a_copy_is_a_lock_of_its_own() -> None:
    turns = Turns()
    with turns:
        assert is_free(copy.deepcopy(turns))
