"""A trainer's sign of life to all servers, and what it learns from the answers.

The thread never waits for a step, so a trainer that computes for long is heard all the same. It is also the
one that finds out what became of a server whose data connection ended: whether it lives, came back without
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
from fleet.parameter_server.control_client import ControlClient
from fleet.parameter_server.settings import Settings

__all__ = ["Heartbeat"]

_CHASE_SECONDS: Final = 0.25
"""How often a server whose connection ended is asked whether it is there."""
_SETTLED_SECONDS: Final = 1.0
"""How long after that an answer proves that it lives: a server that ends may answer until it has ended."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    control: ControlClient
    incarnation: str
    heard: float
    named: bool = False
    waiting_for: str = ""
    ended: FleetError | None = None
    """Why the data connection ended, where it did."""
    ended_at: float = 0.0


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
    """

    def __init__(
        self,
        controls: Sequence[ControlClient],
        incarnations: Sequence[str],
        settings: Settings,
        on_failure: Callable[[FleetError], None],
    ) -> None:
        now = time.monotonic()
        self._peers = [
            _Peer(control, incarnation, now)
            for control, incarnation in zip(controls, incarnations, strict=True)
        ]
        self._settings = settings
        self._on_failure = on_failure
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="fleet-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop = True
        self._wake.set()
        self._thread.join()

    def connection_ended(self, server: int, error: FleetError) -> None:
        """Find out what became of a server whose data connection ended."""
        self._peers[server].ended_at = time.monotonic()
        self._peers[server].ended = error
        self._wake.set()

    def waiting_for(self) -> str:
        """Return whom the servers wait for, as of their latest answers; empty when for nobody."""
        clauses = {peer.waiting_for for peer in self._peers if peer.waiting_for}
        return "; ".join(sorted(clauses))

    def _run(self) -> None:
        while not self._stop:
            began = time.monotonic()
            chasing = any(peer.ended is not None for peer in self._peers)
            pause = _CHASE_SECONDS if chasing else self._settings.heartbeat_seconds
            self._beat(timeout_seconds=max(1.0, self._settings.heartbeat_seconds))
            self._wake.wait(max(0.0, began + pause - time.monotonic()))
            self._wake.clear()

    def _beat(self, timeout_seconds: float) -> None:
        replies = [(peer, peer.control.heartbeat(timeout_seconds)) for peer in self._peers]
        for peer, future in replies:
            try:
                reply = future.result(timeout=timeout_seconds + 1.0)
            except (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                self._unanswered(peer)
                continue
            peer.heard, peer.named, peer.waiting_for = time.monotonic(), False, reply.waiting_for
            if reply.incarnation != peer.incarnation:
                self._on_failure(
                    StateLostError(
                        f"parameter server {peer.control.endpoint} came back without its state (incarnation "
                        f"{reply.incarnation} instead of {peer.incarnation}); the job must start anew"
                    )
                )
            elif peer.ended is not None and time.monotonic() - peer.ended_at >= _SETTLED_SECONDS:
                self._on_failure(
                    FleetError(f"{peer.ended}; the server lives, so this trainer must join it again")
                )

    def _unanswered(self, peer: _Peer) -> None:
        if self._stop:
            return
        silent = time.monotonic() - peer.heard
        if not peer.named and (silent >= self._settings.silent_seconds or peer.ended is not None):
            peer.named = True
            reason = f": {peer.ended}" if peer.ended is not None else ""
            _log.warning(
                "parameter server %s has not answered for %.0f s%s; waiting for it",
                peer.control.endpoint,
                silent,
                reason,
            )
        limit = self._settings.deadline_seconds + (0 if peer.ended else self._settings.silent_seconds)
        if silent >= limit:
            self._on_failure(
                PeerLostError(
                    f"parameter server {peer.control.endpoint} has not answered for {silent:.0f} s; it "
                    "has vanished for good, as FLAGS_rpc_deadline is "
                    f"{self._settings.deadline_seconds * 1000:.0f} ms"
                )
            )
