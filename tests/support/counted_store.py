"""An in-process store that counts requests, for tests with many trainers."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError

__all__ = ["CountedStore"]


class CountedStore:
    """An in-memory replacement for torch's store that counts requests; safe for any number of threads.

    Attributes
    ----------
    keys, bytes, sets : int
        The number of keys in requests, the number of bytes of keys and values in both directions, and the
        number of calls of `set`.
    """

    def __init__(self) -> None:
        self.keys = self.bytes = self.sets = 0
        self._values: dict[str, bytes] = {}
        self._there: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._lock = threading.Lock()
        self._timeout = timedelta(seconds=60)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str) -> None:
        self._count([key], value)
        with self._lock:
            self.sets += 1
            self._values[key] = value.encode()
        self._event(key).set()

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._wait(keys, self._timeout)
        found = [self._values[key] for key in keys]
        self._count(keys, *found)
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._count(keys)
        self._wait(keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        self._count(keys)
        return all(key in self._values for key in keys)

    def add(self, key: str, number: int) -> int:
        self._count([key], str(number))
        with self._lock:
            total = int(self._values.get(key, b"0")) + number
            self._values[key] = str(total).encode()
        self._event(key).set()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            found = self._values.get(key, b"")
            if found == expected.encode():
                found = self._values[key] = desired.encode()
        self._event(key).set()
        self._count([key], expected, desired, found)
        return found

    def _event(self, key: str) -> threading.Event:
        with self._lock:
            return self._there[key]

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        for key in keys:
            if not self._event(key).wait(timeout.total_seconds()):
                raise DistStoreError(f"wait timeout after {timeout}, keys: {key}")

    def _count(self, keys: Sequence[str], *values: str | bytes) -> None:
        with self._lock:
            self.keys += len(keys)
            self.bytes += sum(map(len, keys)) + sum(map(len, values))
