"""A trainer's heartbeats to all servers, and the handling of the replies.

A separate thread sends the heartbeats and never waits for a step, so a trainer with a long step keeps sending
heartbeats. If a server's data connection breaks, the thread also determines whether the server is alive, has
restarted without its state, or is lost.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from fleet.errors import FleetError, PeerLostError, StateLostError
from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.settings import Settings
from fleet.process.resources import WatchClock
from fleet.tables.ids import SHARDS

__all__ = ["Heartbeat", "TableTotals"]

_CHASE_SECONDS: Final = 0.25
"""The interval between heartbeats while a server has no data connection."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    control: ControlClient
    incarnation: str
    heard: float
    lived: float = 0.0
    """The time at which the latest answered heartbeat was sent; the server was alive after that time."""
    named: bool = False
    waiting_for: str = ""
    lost: FleetError | None = None
    """The error that broke the data connection; None while it is open."""


class Heartbeat:
    """Sends heartbeats to all servers from a background thread.

    Parameters
    ----------
    controls : sequence of ControlClient
        One per server.
    incarnations : sequence of str
        The incarnation of each server that this trainer joined.
    settings : Settings
    on_failure : callable
        Called once for each failure that training cannot survive.
    on_beat : callable
        Called before each heartbeat; must not block.
    clock : WatchClock
        The clock that measures silence.
    """

    def __init__(
        self,
        controls: Sequence[ControlClient],
        incarnations: Sequence[str],
        settings: Settings,
        on_failure: Callable[[FleetError], None],
        on_beat: Callable[[], None],
        clock: WatchClock,
    ) -> None:
        now = clock.now()
        self.tables = TableTotals()
        """Statistics of the servers' tables, from the latest replies; servers send them only to trainer 0."""
        self._peers = [
            _Peer(control, incarnation, now)
            for control, incarnation in zip(controls, incarnations, strict=True)
        ]
        self._settings = settings
        self._on_failure = on_failure
        self._on_beat = on_beat
        self._clock = clock
        self._wake = threading.Event()
        self._stop = False
        self._warned_past = False
        self._thread = threading.Thread(target=self._run, name="fleet-heartbeat", daemon=True)

    def start(self) -> None:
        """Start sending heartbeats."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._stop = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def connection_lost(self, server: int, error: FleetError) -> None:
        """Record that a server's data connection broke; heartbeats then show whether the server is alive."""
        self._peers[server].lost = error
        self._wake.set()

    def connection_regained(self, server: int) -> None:
        """Record that a server's data connection is open again."""
        self._peers[server].lost = None

    def heard(self, server: int) -> None:
        """Record that data arrived from a server, which shows that it is alive even if it is busy."""
        self._peers[server].heard = self._clock.now()

    def lived(self, server: int) -> float:
        """Return the latest time at which a server was known to be alive, or 0 before its first reply.

        The time is that of the monotonic clock. If a server has restarted without its state, the failure is
        reported before the reply counts here.
        """
        return self._peers[server].lived

    def waiting_for(self) -> str:
        """Describe the trainers that servers wait for, as of the latest replies; "" if there are none."""
        clauses = {peer.waiting_for for peer in self._peers if peer.waiting_for}
        return "; ".join(sorted(clauses))

    def beat(self) -> None:
        """Send one heartbeat to every server; handle the replies that arrive within the time limit."""
        timeout_seconds = max(1.0, self._settings.heartbeat_seconds)
        sent = time.monotonic()
        replies = [(peer, peer.control.heartbeat(timeout_seconds)) for peer in self._peers]
        for server, (peer, future) in enumerate(replies):
            try:
                reply = future.result(timeout=timeout_seconds + 1.0)
            except (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                self._unanswered(peer)
                continue
            self._answered(peer, reply, sent)
            self.tables.take(server, reply.tables)

    def _run(self) -> None:
        while not self._stop:
            began = time.monotonic()
            chasing = any(peer.lost is not None for peer in self._peers)
            pause = _CHASE_SECONDS if chasing else self._settings.heartbeat_seconds
            self._on_beat()
            self.beat()
            self._wake.wait(max(0.0, began + pause - time.monotonic()))
            self._wake.clear()

    def _answered(self, peer: _Peer, reply: control_pb2.HeartbeatReply, sent: float) -> None:
        peer.heard, peer.named, peer.waiting_for = self._clock.now(), False, reply.waiting_for
        if reply.incarnation != peer.incarnation:
            self._on_failure(
                StateLostError(
                    f"parameter server {peer.control.endpoint} came back without its state (incarnation "
                    f"{reply.incarnation} instead of {peer.incarnation}); the job must be restarted"
                )
            )
        # This comes last: a thread that sees the new time must also find the failure that was reported above.
        peer.lived = sent
        if reply.steps_past and not self._warned_past:
            self._warned_past = True
            _log.warning(
                "this trainer joined late, and the others have completed: from here on it trains alone, on "
                "its own data. A loop over fleet.epochs() or fleet.steps() would start at the job's current "
                "step and end with the others"
            )

    def _unanswered(self, peer: _Peer) -> None:
        # While the session ends, a server may end first, which is no failure.
        if self._stop:
            return
        silent = self._clock.now() - peer.heard
        if not peer.named and (silent >= self._settings.silent_seconds or peer.lost is not None):
            peer.named = True
            reason = f": {peer.lost}" if peer.lost is not None else ""
            _log.warning(
                "parameter server %s has not answered for %.0f s%s; waiting for it",
                peer.control.endpoint,
                silent,
                reason,
            )
        limit = self._settings.deadline_seconds + (0 if peer.lost else self._settings.silent_seconds)
        if silent >= limit:
            self._on_failure(
                PeerLostError(
                    f"parameter server {peer.control.endpoint} has not answered for {silent:.0f} s; it has "
                    "vanished for good, because FLAGS_rpc_deadline is "
                    f"{self._settings.deadline_seconds * 1000:.0f} ms"
                )
            )


class TableTotals:
    """The latest statistics of the tables on all servers. Thread-safe."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[control_pb2.TableStatistics, ...]] = {}

    def take(self, server: int, tables: Iterable[control_pb2.TableStatistics]) -> None:
        """Store the latest statistics of one server, which replace its earlier ones."""
        self._latest[server] = tuple(tables)

    def total(self) -> list[dict[str, str | int | float]]:
        """Return each table's statistics, combined over all servers, as JSON-ready data.

        Returns
        -------
        list of dict
            ``name``, ``rows``, ``bytes`` and ``rowsOnDisk``; ``shardSkew``, the rows of the fullest virtual
            shard divided by the mean; and, once ids have been looked up, ``hitPercentage``, the percentage of
            these ids that had a row.
        """
        parts: dict[str, list[control_pb2.TableStatistics]] = {}
        for table in [table for tables in list(self._latest.values()) for table in tables]:
            parts.setdefault(table.name, []).append(table)
        return [{"name": name, **_total(of_table)} for name, of_table in parts.items()]


def _total(parts: Sequence[control_pb2.TableStatistics]) -> dict[str, str | int | float]:
    rows = sum(part.rows for part in parts)
    fullest = max(part.rows_of_fullest_shard for part in parts)
    total: dict[str, str | int | float] = {
        "rows": rows,
        "bytes": sum(part.bytes for part in parts),
        "rowsOnDisk": sum(part.rows_on_disk for part in parts),
        "shardSkew": round(fullest * SHARDS / rows, 2) if rows else 1.0,
    }
    if looked_up := sum(part.looked_up for part in parts):
        total["hitPercentage"] = 100 * sum(part.found for part in parts) // looked_up
    return total
