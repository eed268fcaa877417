"""The thread that waits for sockets, and the pool of threads for what takes long."""

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from fleet.parameter_server.transport.event_loop import READ, EventLoop, WorkPool

SECONDS = 10.0


def test_a_failing_handler_stops_no_other(loop, caplog):
    here, there = socket.socketpair()
    called = threading.Event()

    def handle(events: int) -> None:
        assert events == READ
        here.recv(1)
        called.set()

    def fail() -> None:
        raise ZeroDivisionError("by nought")

    loop.call(fail)
    loop.call(lambda: loop.watch(here, 0, READ, handle))
    with here, there:
        there.send(b"1")
        assert called.wait(SECONDS)
        done = threading.Event()
        loop.call(lambda: loop.watch(here, READ, 0, handle))
        loop.call(done.set)
        assert done.wait(SECONDS)
    assert "ZeroDivisionError" in caplog.text


def test_what_is_due_later_comes_in_the_order_of_its_times(loop):
    order = queue.SimpleQueue[int]()

    def begin() -> None:
        for number in (3, 1, 2):
            loop.call_later(number / 100, lambda number=number: order.put(number))

    loop.call(begin)
    assert [order.get(timeout=SECONDS) for _ in range(3)] == [1, 2, 3]


def test_calls_before_the_start_are_made_and_the_end_waits_for_calls():
    loop, called = EventLoop(1), list[int]()
    loop.call(lambda: called.append(1))
    loop.start()
    loop.call(lambda: called.append(2))
    loop.close()
    assert called == [1, 2]


@pytest.fixture
def pool() -> Iterator[WorkPool]:
    made = WorkPool(2)
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
    pool, done = WorkPool(2), threading.Semaphore(0)
    for _ in range(4):
        pool.submit(lambda: done.release())
    pool.close()
    pool.start()
    assert all(done.acquire(timeout=SECONDS) for _ in range(4))
    for thread in pool._threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
