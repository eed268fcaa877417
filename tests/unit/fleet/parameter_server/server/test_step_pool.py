"""The threads that step large blocks: as many at once as there are, and small blocks not at all."""

import contextlib
import queue
import threading
from collections.abc import Iterator

import pytest

from fleet.parameter_server.server.step_pool import LEAST_BYTES, StepPool

SECONDS = 10.0


@pytest.fixture
def pool() -> Iterator[StepPool]:
    made = StepPool(2)
    made.start()
    yield made
    made.close()


def test_as_much_is_done_at_once_as_there_are_threads(pool):
    met = threading.Barrier(3)
    for _ in range(2):
        pool.submit(lambda: met.wait(SECONDS))
    met.wait(SECONDS)


def test_no_more_is_done_at_once_than_there_are_threads(pool):
    three, met = threading.Barrier(3), queue.SimpleQueue[bool]()

    def meet() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            three.wait(0.5)
        met.put(not three.broken)

    for _ in range(3):
        pool.submit(meet)
    assert [met.get(timeout=SECONDS) for _ in range(3)] == [False, False, False]


def test_what_was_handed_over_is_done_before_the_threads_end():
    pool, done = StepPool(2), threading.Semaphore(0)
    for _ in range(4):
        pool.submit(lambda: done.release())
    pool.close()
    pool.start()
    assert all(done.acquire(timeout=SECONDS) for _ in range(4))
    for thread in pool._threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("threads", "received_bytes", "expected"),
    [
        pytest.param(2, LEAST_BYTES, True, id="large"),
        pytest.param(2, LEAST_BYTES - 1, False, id="small"),
        pytest.param(2, 0, False, id="nothing-is-received-through-shared-memory"),
        pytest.param(1, 1 << 30, False, id="one-core-gains-nothing"),
    ],
)
def test_what_is_worth_a_threads_waking(threads, received_bytes, expected):
    assert StepPool(threads).takes(received_bytes) is expected
