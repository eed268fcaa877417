"""Waiting for other threads of a session: what they find wrong ends every wait."""

import threading
import time
from collections.abc import Callable
from typing import Final

from fleet.errors import DeadlineExceededError, FleetError
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.waiting import WaitLog
from fleet.process.resources import WatchClock

__all__ = ["LOOK_SECONDS", "Waits"]

LOOK_SECONDS: Final = 1.0
"""How often a wait looks whether something has failed."""


class Waits:
    """The waits of one session, and the failure that ends them.

    Parameters
    ----------
    settings : Settings
    clock : WatchClock
        By which a wait is too long.
    """

    def __init__(self, settings: Settings, clock: WatchClock) -> None:
        self.settings = settings
        self.clock = clock
        self.changed = threading.Condition()
        """Guards what is waited for; whoever changes that notifies."""
        self._failure: FleetError | None = None

    def fail(self, error: FleetError) -> None:
        """Keep an error until the training thread asks next; the first one counts."""
        with self.changed:
            if self._failure is None:
                self._failure = error
            self.changed.notify_all()

    def check(self) -> None:
        """Raise the failure that a thread of this session has found, if there is one."""
        if self._failure is not None:
            raise self._failure

    def wake(self) -> None:
        """Let who waits look again."""
        with self.changed:
            self.changed.notify_all()

    def wait_until(self, done: Callable[[], bool], describe: Callable[[], str]) -> float:
        """Wait for something that another thread brings about; return for how many seconds that lasted.

        Raises
        ------
        FleetError
            What another thread has found, or the wait has lasted too long.
        """
        log, began = WaitLog(self.clock.now), time.monotonic()
        limit_seconds = self.settings.stalled_seconds + self.settings.silent_seconds
        with self.changed:
            while not done():
                self.check()
                waited = log.note("step", lambda: f"waiting for {describe()}")
                if waited >= limit_seconds:
                    raise DeadlineExceededError(f"waited {waited:.0f} s for {describe()}")
                self.changed.wait(LOOK_SECONDS)  # last: what it was about may have come by its end
        return time.monotonic() - began
