"""Whether a server serves: what all of its threads look at, and tell each other by."""

import secrets
import threading

from fleet.errors import FleetError

__all__ = ["Serving"]


class Serving:
    """The state of one server's service. It ends once, for a reason or because its work is done."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Guards what is known of the trainers; told whenever that changes, or this."""
        self.incarnation = secrets.token_hex(8)
        """A random name, by which trainers tell this service from a later one."""
        self.failure: FleetError | None = None
        """Why it ends, if something has failed."""
        self.is_closing = False
        """Whether it has come to its end."""

    def fail(self, error: FleetError) -> None:
        """End the service because of an error that any thread has found; the first one counts."""
        with self.changed:
            if self.failure is None:
                self.failure = error
            self.changed.notify_all()

    def close(self) -> None:
        """End the service."""
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()

    def check(self) -> None:
        """Raise what has failed; with the lock held."""
        if self.failure is not None:
            raise self.failure
