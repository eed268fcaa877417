"""Runs an iterator in a thread, a bounded number of items ahead of its consumer."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

from fleet.errors import ConfigurationError

__all__ = ["Prefetcher"]

T = TypeVar("T")

_PATIENCE: Final = 10.0
"""The time in seconds after which a wait is logged."""
_log = logging.getLogger(__name__)


class Prefetcher(Generic[T]):
    """Runs an iterator in a thread, ahead of its consumer.

    If the iterator raises an error, `__next__` raises this error in place of the next item. The thread ends
    with the iterator or, after `close`, as soon as the iterator has produced its current item.

    Parameters
    ----------
    make : callable
        Returns the iterable. The thread calls it, so it may be slow.
    capacity : int
        The number of items to read ahead; at least 1.
    what : str
        The name of the iterator in log messages.

    Raises
    ------
    ConfigurationError
        `capacity` is below 1.
    """

    def __init__(self, make: Callable[[], Iterable[T]], capacity: int, what: str) -> None:
        if capacity < 1:
            raise ConfigurationError(f"{what}: the capacity is {capacity!r}; expected 1 or more batches")
        self._make = make
        self._capacity = capacity
        self._what = what
        self._items: deque[T] = deque()
        self._ended = self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        # A daemon, because the script's generator may never end.
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            while not self._changed.wait_for(lambda: self._items or self._ended, _PATIENCE):
                _log.info("still waiting for %s to provide the next batch", self._what)
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread, wait for it to end, and discard prefetched items."""
        with self._changed:
            self._closed = self._ended = True
            self._items.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                _log.warning("%s makes one more batch before its thread can end", self._what)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._make():
                with self._changed:
                    self._changed.wait_for(lambda: len(self._items) < self._capacity or self._closed)
                    if self._closed:
                        break
                    self._items.append(item)
                    self._changed.notify_all()
        except BaseException as raised:  # noqa: BLE001 - the reader raises it, SystemExit too
            error = raised
        with self._changed:
            self._error = None if self._closed else error
            self._ended = True
            self._changed.notify_all()
