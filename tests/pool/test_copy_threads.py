"""Two threads that copy do not stand in each other's way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from threading import Barrier

from xinference_xavier.pool.copy_threads import COPY_THREADS, copy_threads

PROCESSORS = sorted(os.sched_getaffinity(0))


def processors_of_each() -> list[list[int]]:
    together = Barrier(COPY_THREADS)

    def processors() -> list[int]:
        together.wait()
        return sorted(os.sched_getaffinity(0))

    with copy_threads() as pool:
        asked = [pool.submit(processors) for _ in range(COPY_THREADS)]
        return sorted(each.result() for each in asked)


def in_a_process_bound_to(first: list[int], second: list[int]) -> list[list[int]]:
    """`processors_of_each` where one thread may run on `first` and all others on `second`."""
    words = [sys.executable, "-m", __name__, json.dumps([first, second])]
    answer: list[list[int]] = json.loads(subprocess.check_output(words))
    return answer


def test_each_has_processors_of_its_own() -> None:
    first, second = processors_of_each()
    assert first
    assert second
    assert sorted(first + second) == PROCESSORS


def test_where_there_is_one_they_share_it() -> None:
    only = PROCESSORS[:1]
    assert in_a_process_bound_to(only, only) == [only, only]


def test_they_may_run_wherever_a_thread_of_their_process_may() -> None:
    """As where vLLM has bound each of OpenMP's threads, and the one that starts ours with them."""
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
    print(json.dumps(processors_of_each()))
    done.set()
