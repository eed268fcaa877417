"""Deadlines and other positive numbers that are read from environment variables."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fleet.errors import ConfigurationError

__all__ = ["Deadlines", "count", "positive"]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """A replica's time limits for its peers, and its heartbeat interval."""

    heartbeat_seconds: float = 2.0
    deadline_seconds: float = 180.0
    start_deadline_seconds: float | None = None
    """The time limit for peers that have not started yet; None means the limit for a lost peer."""

    @property
    def silent_seconds(self) -> float:
        """The seconds of silence, five heartbeat intervals, after which the log names a peer."""
        return 5 * self.heartbeat_seconds

    @property
    def starting_seconds(self) -> float:
        """The time limit for peers that have not started yet, never below the deadline for a lost peer.

        The job's pendingDeadlineSeconds may be short, because it ends when the pods run. The processes must
        then still import modules and load data before they join.
        """
        return max(self.start_deadline_seconds or 0.0, self.deadline_seconds)

    @property
    def stalled_seconds(self) -> float:
        """The maximum time for which a live peer may keep the others waiting.

        This is much longer than the deadline for a lost peer, because a long evaluation or checkpoint on one
        trainer is not a failure.
        """
        return 10 * self.deadline_seconds

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Deadlines":
        """Read the limits from environment variables, with the default for each unset variable.

        The variables are ``FLEET_HEARTBEAT_SECONDS``, ``FLAGS_rpc_deadline`` (in milliseconds) and
        ``FLEET_START_DEADLINE_SECONDS``.

        Raises
        ------
        ConfigurationError
            A value is not a positive number; the message names the variable.
        """
        return cls(
            heartbeat_seconds=positive(environ, "FLEET_HEARTBEAT_SECONDS", 2.0),
            deadline_seconds=positive(environ, "FLAGS_rpc_deadline", 180_000.0) / 1000,
            start_deadline_seconds=positive(environ, "FLEET_START_DEADLINE_SECONDS", 0.0) or None,
        )


def positive(environ: Mapping[str, str], name: str, default: float) -> float:
    """Return the positive number in a variable, or `default` if the variable is unset or empty.

    Raises
    ------
    ConfigurationError
        The variable has another value.
    """
    text = environ.get(name, "")
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigurationError(f"{name} is {text!r}; expected a positive number")
    return number


def count(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return the positive whole number in a variable, or `default` if it is unset; see `positive`."""
    number = positive(environ, name, default)
    if number != int(number):
        raise ConfigurationError(f"{name} is {environ[name]!r}; expected a whole number")
    return int(number)
