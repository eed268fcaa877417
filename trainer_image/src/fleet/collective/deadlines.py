"""How long a collective job waits, and after which time it says for whom."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from fleet.errors import ConfigurationError

__all__ = ["Deadlines"]


@dataclass(frozen=True)
class Deadlines:
    """All in seconds. A trainer is silent after five heartbeats without a new one."""

    heartbeat_seconds: float = 2.0
    lost_seconds: float = 180.0
    """For how long a trainer may be silent before it counts as lost for good."""
    start_seconds: float | None = None
    """For how long one that has never been there is waited for; None: as long as for one that is lost."""

    @property
    def silent_seconds(self) -> float:
        """After how long without a heartbeat the log names a trainer."""
        return 5 * self.heartbeat_seconds

    @property
    def stalled(self) -> timedelta:
        """How long a trainer that is alive may keep the others waiting; an evaluation may take its time."""
        return timedelta(seconds=10 * self.lost_seconds)

    @property
    def starting_seconds(self) -> float:
        """For how long a trainer that has never been there is waited for: never less than for a lost one."""
        return max(self.start_seconds or 0.0, self.lost_seconds)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Deadlines":
        """Read ``FLEET_HEARTBEAT_SECONDS``, ``FLAGS_rpc_deadline`` (ms), ``FLEET_START_DEADLINE_SECONDS``."""
        start = environ.get("FLEET_START_DEADLINE_SECONDS")
        return cls(
            heartbeat_seconds=_positive(environ, "FLEET_HEARTBEAT_SECONDS", "2"),
            lost_seconds=_positive(environ, "FLAGS_rpc_deadline", "180000") / 1000,
            start_seconds=_positive(environ, "FLEET_START_DEADLINE_SECONDS", "") if start else None,
        )


def _positive(environ: Mapping[str, str], name: str, default: str) -> float:
    text = environ.get(name) or default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigurationError(f"{name} is {text!r}; expected a positive number")
    return number
