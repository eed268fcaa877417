"""Scheduling of tests: tests run in parallel processes, but those marked `serial` run alone.

A running test holds the lock `room`: shared, or exclusively if the test is serial. To get this lock, a
process must first hold the lock `door`, so that no other test overtakes a waiting serial test. A process
keeps both locks from one serial test to the next.
"""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

__all__ = ["Scheduler", "Turns", "arrange", "is_serial"]

ORDER = ("controlplane", "runtime", "unit")
"""Folders in descending order of their longest test, so that only short tests remain at the end."""

SHARING = (
    "test_collective_twins.py",
    "test_equality.py",
    "test_golden.py",
    "test_addresses.py",
    "test_own_loops.py",
    "test_wheels.py",
    "test_wire_faults.py",
)
"""Modules whose tests share a slow set-up or the addresses that they bind."""

OWN_PLANE = ("test_chart.py", "test_kueue.py", "test_restored_etcd.py")
"""Modules of `controlplane` that start their own control plane."""

OWN_OPERATORS = (
    "test_builds.py",
    "test_election.py",
    "test_faults.py",
    "test_kills.py",
    "test_namespaces.py",
    "test_network_policies.py",
)
"""Modules of `controlplane` that start their own operators; all other modules share one operator."""


def is_serial(item: pytest.Item | None) -> bool:
    """Return whether a test must run alone."""
    return item is not None and item.get_closest_marker("serial") is not None


def arrange(items: list[pytest.Item], root: Path) -> None:
    """Sort tests into the order in which they are scheduled.

    Serial tests come first, while no other test is running that would have to finish before them.
    """

    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(root).parts[0]

    def place(item: pytest.Item) -> tuple[bool, int]:
        return not is_serial(item), ORDER.index(folder(item)) if folder(item) in ORDER else len(ORDER)

    items.sort(key=place)


class Scheduler(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """A scheduler that assigns tests individually; tests that share a resource run in one process.

    The unit tests of a module are short, and are assigned together.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        if "/controlplane/" in module and not module.endswith(OWN_PLANE):
            return "operators" if module.endswith(OWN_OPERATORS) else "operator"
        return module if "/unit/" in module or module.endswith(OWN_PLANE + SHARING) else nodeid

    def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
        """Return the number of pending tests, after deleting the completed scopes.

        After each test, xdist counts the tests of all scopes that a worker was ever given.
        """
        for scope in [scope for scope, completed in workload.items() if all(completed.values())]:
            del workload[scope]
        return int(super()._pending_of(workload))


class Turns:
    """Locks, shared by all processes with the same folder, that decide which tests may run."""

    def __init__(self, folder: Path) -> None:
        self._door = (folder / "door").open("w")
        self._room = (folder / "room").open("w")
        self._alone = False

    @contextmanager
    def turn(self, *, serial: bool, next_is_serial: bool) -> Iterator[None]:
        """Wait until a test may run, and hold its lock within the block."""
        if not self._alone:
            fcntl.flock(self._door, fcntl.LOCK_EX)
            fcntl.flock(self._room, fcntl.LOCK_EX if serial else fcntl.LOCK_SH)
            if not serial:
                fcntl.flock(self._door, fcntl.LOCK_UN)
            self._alone = serial
        try:
            yield
        finally:
            if not (self._alone and next_is_serial):
                fcntl.flock(self._room, fcntl.LOCK_UN)
                fcntl.flock(self._door, fcntl.LOCK_UN)
                self._alone = False
