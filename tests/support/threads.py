"""Helpers for concurrent calls in threads of the test process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["at_once", "one_torch_thread"]


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Make torch compute in the calling thread only, for reproducible results and a lower load."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def at_once(*calls: Callable[[], Any], seconds: float = 100.0) -> list[Any]:
    """Run each call in its own thread; return all results or raise the first error."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(position: int, call: Callable[[], Any]) -> None:
        try:
            results[position] = call()
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        if errors:  # the others may wait for the call that failed
            raise errors[0]
        assert not thread.is_alive(), "a call still waits"
    return results
