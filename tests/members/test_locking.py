from __future__ import annotations

import copy
import threading

from hf_bayes.members.locking import CopyableLock


def is_free(lock: CopyableLock) -> bool:
    """Return whether another thread could take the lock at once."""
    found: list[bool] = []

    def ask() -> None:
        found.append(lock._lock.acquire(blocking=False))
        if found[0]:
            lock._lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_may_enter_again_and_others_wait() -> None:
    lock = CopyableLock()
    with lock:
        with lock:
            assert not is_free(lock)
        assert not is_free(lock)
    assert is_free(lock)


def test_a_copy_is_a_lock_of_its_own() -> None:
    lock = CopyableLock()
    with lock:
        assert is_free(copy.deepcopy(lock))
