"""How long the processes of a job wait for each other, and after which time they say for whom."""

from collections.abc import Mapping
from dataclasses import dataclass

from fleet.environment.numbers import positive

__all__ = ["Deadlines"]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Times in seconds. A peer is silent after `silent_seconds`, and lost `deadline_seconds` later."""

    heartbeat_seconds: float = 2.0
    deadline_seconds: float = 180.0
    start_deadline_seconds: float | None = None
    """How long peers that have never been there are waited for; None: as long as one that is lost."""

    @property
    def silent_seconds(self) -> float:
        """After how long without a word the log names a peer: five heartbeats."""
        return 5 * self.heartbeat_seconds

    @property
    def starting_seconds(self) -> float:
        """How long peers that have never been there are waited for: at least as long as one that is lost.

        The job's pendingDeadlineSeconds may be short, and is kept when its pods run; they have still to
        import and to load before they join.
        """
        return max(self.start_deadline_seconds or 0.0, self.deadline_seconds)

    @property
    def stalled_seconds(self) -> float:
        """How long a peer that is alive may keep the others waiting.

        Much longer than the deadline of a lost one: an evaluation, or a checkpoint of one trainer only, is
        no failure. But nobody waits for ever.
        """
        return 10 * self.deadline_seconds

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Deadlines":
        """Read ``FLEET_HEARTBEAT_SECONDS``, ``FLAGS_rpc_deadline`` (ms), ``FLEET_START_DEADLINE_SECONDS``.

        Raises
        ------
        ConfigurationError
            A value is no positive number; the message names the variable.
        """
        return cls(
            heartbeat_seconds=positive(environ, "FLEET_HEARTBEAT_SECONDS", 2.0),
            deadline_seconds=positive(environ, "FLAGS_rpc_deadline", 180_000.0) / 1000,
            start_deadline_seconds=positive(environ, "FLEET_START_DEADLINE_SECONDS", 0.0) or None,
        )
