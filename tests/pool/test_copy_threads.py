"""Each copy thread has its own processors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from threading import Barrier

from xinference_xavier.pool.copy_threads import COPY_THREADS, copy_threads

PROCESSORS = sorted(os.sched_getaffinity(0))


def processors_of_threads() -> list[list[int]]:
    barrier = Barrier(COPY_THREADS)

    def processors() -> list[int]:
        barrier.wait()
        return sorted(os.sched_getaffinity(0))

    with copy_threads() as pool:
        futures = [pool.submit(processors) for _ in range(COPY_THREADS)]
        return sorted(future.result() for future in futures)


def in_a_process_bound_to(first: list[int], second: list[int]) -> list[list[int]]:
    """`processors_of_threads` where one thread is bound to `first` and all others to `second`."""
    words = [sys.executable, "-m", __name__, json.dumps([first, second])]
    answer: list[list[int]] = json.loads(subprocess.check_output(words))
    return answer


def test_each_has_processors_of_its_own() -> None:
    first, second = processors_of_threads()
    assert first
    assert second
    assert sorted(first + second) == PROCESSORS


def test_a_single_processor_is_shared() -> None:
    only = PROCESSORS[:1]
    assert in_a_process_bound_to(only, only) == [only, only]


def test_they_use_the_processors_of_all_threads_of_the_process() -> None:
    """vLLM binds each OpenMP thread, and with them the thread that starts ours."""
    first, second = PROCESSORS[:1], PROCESSORS[1:2]
    assert in_a_process_bound_to(first, second) == [first, second]


if __name__ == "__main__":
    other, own = json.loads(sys.argv[1])
    bound, done = threading.Event(), threading.Event()

    def stay() -> None:
        os.sched_setaffinity(0, other)
        bound.set()
        done.wait()

    staying = threading.Thread(target=stay)
    staying.start()
    bound.wait()
    os.sched_setaffinity(0, own)
    print(json.dumps(processors_of_threads()))
    done.set()
