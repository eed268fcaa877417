"""What the environment may tune about the runtime; read once, at ``fleet.init``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fleet.errors import ConfigurationError

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Times are in seconds. A peer is silent after `silent_seconds`, and lost `deadline_seconds` later."""

    heartbeat_seconds: float = 2.0
    deadline_seconds: float = 180.0
    socket_buffer_bytes: int | None = None
    """Size of the data connections' kernel buffers; None lets the kernel tune them."""

    @property
    def silent_seconds(self) -> float:
        """After how long without a word the log names a peer: five heartbeats."""
        return 5 * self.heartbeat_seconds

    @property
    def stalled_seconds(self) -> float:
        """How long a peer that is alive may keep the others waiting.

        Much longer than the deadline of a lost one: an evaluation, or a checkpoint of one trainer only, is
        no failure. But nobody waits for ever.
        """
        return 10 * self.deadline_seconds

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Settings":
        """Read ``FLEET_HEARTBEAT_SECONDS``, ``FLAGS_rpc_deadline`` (ms) and ``FLEET_SOCKET_BUFFER_BYTES``.

        Raises
        ------
        ConfigurationError
            A value is no positive number; the message names the variable.
        """
        buffer_bytes = environ.get("FLEET_SOCKET_BUFFER_BYTES")
        return cls(
            heartbeat_seconds=_positive(environ, "FLEET_HEARTBEAT_SECONDS", 2.0),
            deadline_seconds=_positive(environ, "FLAGS_rpc_deadline", 180_000.0) / 1000,
            socket_buffer_bytes=int(_positive(environ, "FLEET_SOCKET_BUFFER_BYTES", 0))
            if buffer_bytes
            else None,
        )


def _positive(environ: Mapping[str, str], name: str, default: float) -> float:
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
