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
    """For how long a trainer may be silent, or absent at the start, before it counts as lost for good."""

    @property
    def silent_seconds(self) -> float:
        """After how long without a heartbeat the log names a trainer."""
        return 5 * self.heartbeat_seconds

    @property
    def stalled(self) -> timedelta:
        """How long a trainer that is alive may keep the others waiting; an evaluation may take its time."""
        return timedelta(seconds=10 * self.lost_seconds)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Deadlines":
        """Read ``FLEET_HEARTBEAT_SECONDS`` and ``FLAGS_rpc_deadline`` (milliseconds)."""
        return cls(
            heartbeat_seconds=_positive(environ, "FLEET_HEARTBEAT_SECONDS", "2"),
            lost_seconds=_positive(environ, "FLAGS_rpc_deadline", "180000") / 1000,
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
