"""A trainer's sign of life to all servers, and what it learns from the answers.

The thread never waits for a step, so a trainer that computes for long is heard all the same. It is also the
one that finds out what became of a server whose data connection broke: whether it lives, came back without
its state, or is gone.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from fleet.errors import FleetError, PeerLostError, StateLostError
from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.control.table_totals import TableTotals
from fleet.parameter_server.settings import Settings
from fleet.process.resources import WatchClock

__all__ = ["Heartbeat"]

_CHASE_SECONDS: Final = 0.25
"""How often a server whose connection ended is asked whether it is there."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    control: ControlClient
    incarnation: str
    heard: float
    lived: float = 0.0
    """When the latest beat that it has answered was sent: only then did it live for sure."""
    named: bool = False
    waiting_for: str = ""
    lost: FleetError | None = None
    """Why there is no data connection, while there is none."""


class Heartbeat:
    """Beats to every server from a thread of its own.

    Parameters
    ----------
    controls : sequence of ControlClient
        One per server.
    incarnations : sequence of str
        The life of each server that this trainer joined.
    settings : Settings
    on_failure : callable
        Called once per failure that training cannot survive.
    on_beat : callable
        Called with each beat; must not wait.
    clock : WatchClock
        By which silence is measured.
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
        """The servers' tables, as of their latest answers to trainer 0."""
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
        self._told_past = False
        self._thread = threading.Thread(target=self._run, name="fleet-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def connection_lost(self, server: int, error: FleetError) -> None:
        """Find out what became of a server whose data connection broke."""
        self._peers[server].lost = error
        self._wake.set()

    def connection_regained(self, server: int) -> None:
        """Take note that there is a data connection again."""
        self._peers[server].lost = None

    def heard(self, server: int) -> None:
        """Take note that something else than an answer has come from a server: it lives, however busy."""
        self._peers[server].heard = self._clock.now()

    def lived(self, server: int) -> float:
        """Return up to when a server is known to have lived, by the monotonic clock; 0 before it answers.

        A later life of it that lacks the state has been reported before it counts here.
        """
        return self._peers[server].lived

    def waiting_for(self) -> str:
        """Return whom the servers wait for, as of their latest answers; empty when for nobody."""
        clauses = {peer.waiting_for for peer in self._peers if peer.waiting_for}
        return "; ".join(sorted(clauses))

    def beat(self) -> None:
        """Beat once, and take the answers; who does not answer soon is passed over."""
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
                    f"{reply.incarnation} instead of {peer.incarnation}); the job must start anew"
                )
            )
        peer.lived = sent
        if reply.steps_past and not self._told_past:
            self._told_past = True
            _log.warning(
                "this trainer joined late and trains past the others, which have completed: what it does "
                "now is on its data alone. A loop over fleet.epochs() or fleet.steps() goes on where the "
                "training is, and ends with the others"
            )

    def _unanswered(self, peer: _Peer) -> None:
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
                    f"parameter server {peer.control.endpoint} has not answered for {silent:.0f} s; it "
                    "has vanished for good, as FLAGS_rpc_deadline is "
                    f"{self._settings.deadline_seconds * 1000:.0f} ms"
                )
            )
