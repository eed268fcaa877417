"""A trainer's session with one server, over one or more successive data connections.

Data is sent over the server's Unix socket if the server is on this host, and otherwise over TCP. If a
connection breaks while the server is alive, a separate thread reconnects, and the training thread only waits
longer. The heartbeat determines whether the server is alive.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from fleet.errors import (
    ConfigurationError,
    DeadlineExceededError,
    FleetError,
    PeerLostError,
    RemoteProtocolError,
)
from fleet.parameter_server.certificates import Certificates
from fleet.parameter_server.control.heartbeat import Heartbeat
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer.parameters import ParameterStore
from fleet.parameter_server.transport.block_transport import (
    BlockTransport,
    Codec,
    SharedMemoryTransport,
    StreamTransport,
)
from fleet.parameter_server.transport.connection import BrokenConnectionError, End, Frame, Work
from fleet.parameter_server.transport.event_loop import EventLoop
from fleet.parameter_server.transport.handshake import GREETING_SECONDS, NotGreetedError, greet
from fleet.parameter_server.transport.shared_memory import SharedBlocks
from fleet.parameter_server.transport.sockets import dial, dial_here, hang_up
from fleet.parameter_server.transport.stream import ResumableStream, SilenceWatchdog
from fleet.parameter_server.transport.tls import TlsSocket
from fleet.parameter_server.waits import WaitLog, split_endpoint
from fleet.plan.job import TrainerPlan
from fleet.process import progress
from fleet.wire import Hello, Identity, Side

if TYPE_CHECKING:
    from fleet.parameter_server.control.proto import control_pb2

__all__ = ["ServerConnection"]

_FIRST_PAUSE_SECONDS: Final = 0.25
_LONGEST_PAUSE_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.05
_FAREWELL_SECONDS: Final = 1.0
_log = logging.getLogger(__name__)


class Owner(Protocol):
    """The interface of the session that owns a connection."""

    plan: TrainerPlan
    settings: Settings
    store: ParameterStore

    def receive(
        self, connection: "ServerConnection", event: Frame | End, *, in_pool: bool = False
    ) -> Work | None:
        """Handle a frame or the end of a data connection; see `transport.connection.Deliver`."""

    def fail(self, error: FleetError) -> None:
        """End the session with an error. Any thread may call this."""

    def check(self) -> None:
        """Raise the error that has ended the session, if there is one."""


class ServerConnection:
    """The connection to one server: its `stream` carries frames, and its `transport` carries blocks.

    Parameters
    ----------
    server : int
        The index of the server in the plan.
    joined : JoinReply
        The server's reply, with its data port, its Unix socket and its incarnation.
    identity : Identity
        The identity of this trainer, with the attempt of this process.
    key : bytes
        The key of the job; each end proves that it has the key. Empty if the job has none.
    certificates : Certificates or None
        The certificates for TLS over TCP.
    owner : Owner
        The session, which handles the frames that arrive.
    heartbeat : Heartbeat
        The heartbeat, which determines whether the server is alive.
    loop : EventLoop
        The loop that serves the data connections.
    """

    def __init__(
        self,
        server: int,
        joined: "control_pb2.JoinReply",
        identity: Identity,
        key: bytes,
        certificates: Certificates | None,
        owner: Owner,
        heartbeat: Heartbeat,
        loop: EventLoop,
    ) -> None:
        plan, self._settings = owner.plan, owner.settings
        self.server = server
        self.endpoint = plan.endpoints[server]
        """The endpoint of the server's control service."""
        self.blocks = {block.id: block for block in plan.blocks_on(server)}
        self.holds = bool(self.blocks) or bool(plan.tables)
        """Whether the server has a part of the model: blocks, or shards of tables."""
        self.completed_trainers: frozenset[int] | None = None
        """The trainers that the server reports as completed; None until its COMPLETE frame arrives."""
        self.has_ended = False
        """Whether the server has ended the session as the protocol specifies, without an error."""
        self._owner = owner
        self._heartbeat = heartbeat
        self.codec = Codec(self.blocks.values(), self._settings.wire_dtype, owner.store.landing)
        self._identity = identity
        self.stream = ResumableStream(
            f"parameter server {self.endpoint}",
            Side.TRAINER,
            identity,
            self.codec.buffer_of,
            partial(owner.receive, self),
            loop,
        )
        self.transport: BlockTransport = StreamTransport(self.stream, self.codec)
        """The transport of blocks, which the first handshake determines."""
        self._row_bytes = {table.number: table.row_bytes for table in plan.tables}
        self._port = joined.data_port
        self._local_name = joined.data_socket if self._settings.transport != "tcp" else ""
        """The name of the Unix socket of a server that may be on this host; empty for none."""
        self._reached_here = False
        self._key = key
        self._certificates = certificates
        self._hello = Hello(joined.incarnation, len(self.codec.block_bytes), secrets.token_hex(8))
        self._memory = self._make_memory()
        """The memory to share with the server; None if memory is not shared."""
        self._greeted = False
        self._greeting: socket.socket | None = None
        """The connection whose handshake is in progress."""
        self._closing = threading.Event()
        self.watchdog = SilenceWatchdog(self.stream, self._settings.silent_seconds)

    def connect(self) -> None:
        """Open the first data connection.

        Raises
        ------
        ConfigurationError
            The settings require shared memory, but the server is on another host or does not share memory.
        FleetError
            No connection could be opened, or the server refuses it; see `_open`.
        """
        self._open(None)
        if self._settings.transport == "shared_memory" and not isinstance(
            self.transport, SharedMemoryTransport
        ):
            raise self._not_here("it shares no memory")

    def close(self) -> None:
        """End the session: gracefully after the server's COMPLETE, otherwise immediately."""
        self._closing.set()
        greeting = self._greeting
        if greeting is not None:
            hang_up(greeting)
        if self.completed_trainers is not None:
            self.stream.finish(_FAREWELL_SECONDS)
        else:
            self.stream.close()

    def ended(self, error: FleetError | None) -> None:
        """Handle the end of a data connection: reconnect if it broke."""
        if self._closing.is_set():
            return
        if isinstance(error, BrokenConnectionError):
            _log.warning("%s; connecting again", error)
            self._heartbeat.connection_lost(self.server, error)
            name = f"fleet-reconnect {self.endpoint}"
            try:
                threading.Thread(target=self._reconnect, name=name, daemon=True).start()
            except RuntimeError as raised:
                self._owner.fail(
                    FleetError(
                        f"{error}; it cannot be opened again: {raised}. Is the limit of threads reached?"
                    )
                )
        elif error is not None:
            self._owner.fail(error)
        else:
            self.has_ended = True

    def _reconnect(self) -> None:
        try:
            resent = self._open(self._lives_since)
        except FleetError as error:
            if not self._closing.is_set():
                self._owner.fail(error)
            return
        progress.count("reconnections", 1)
        progress.count("frames_resent", resent)
        _log.warning(
            "the data connection with parameter server %s is back; %d frames were sent again",
            self.endpoint,
            resent,
        )
        self._heartbeat.connection_regained(self.server)

    def _lives_since(self, since: float) -> bool:
        """Wait for a sign of life from the server after `since`; return False if the session closes first.

        Raises
        ------
        FleetError
            The server is lost.
        """
        while self._heartbeat.lived(self.server) <= since:
            self._owner.check()
            if self._closing.wait(_LOOK_SECONDS):
                return False
        self._owner.check()  # a restarted server also answers, but has lost its state
        return True

    def _open(self, lives_since: Callable[[float], bool] | None) -> int:
        """Open a connection, retrying with growing pauses; return the number of frames sent again.

        A live server that does not answer the greeting is busy, for example with a long step. It answers once
        it has processed its current frame, so this does not count as a failed attempt.

        Parameters
        ----------
        lives_since : callable, optional
            Called after a failed attempt; waits for a later sign of life, and returns whether to retry.
            None for the first connection, when the server has just let this trainer join.

        Raises
        ------
        PeerLostError
            All attempts have failed.
        FleetError
            The server refuses the connection.
        ConfigurationError
            The settings require shared memory, but the server is on another host.
        """
        tries, tried = self._settings.retry_times + 1, 0
        greeting_seconds, log = GREETING_SECONDS, WaitLog()
        while tried < tries:
            pause = min(_FIRST_PAUSE_SECONDS * 2**tried, _LONGEST_PAUSE_SECONDS)
            try:
                return self._open_once(min(greeting_seconds, self._settings.deadline_seconds))
            except (OSError, RemoteProtocolError) as error:
                failure = error
            busy = lives_since is not None and isinstance(failure, NotGreetedError)
            tried += not busy
            if tried < tries and self._closing.wait(pause):
                break
            # Retried only after a sign of life; the heartbeat decides whether the server has vanished.
            if lives_since is not None and not lives_since(time.monotonic()):
                break
            if busy:
                greeting_seconds *= 2
                what = (
                    f"parameter server {self.endpoint}, which answers calls, to greet a new data connection"
                )
                waited = log.note(self.endpoint, lambda: f"waiting for {what}")  # noqa: B023
                if waited >= self._settings.stalled_seconds:
                    raise DeadlineExceededError(f"waited {waited:.0f} s for {what}")
        known = "it let this trainer join" if lives_since is None else "it answers calls"
        raise PeerLostError(
            f"no data connection to parameter server {self.endpoint}, port {self._port}: {failure}; tried "
            f"{tried} {'times' if tried > 1 else 'time'} (FLAGS_rpc_retry_times), though {known}"
        ) from failure

    def _open_once(self, greeting_seconds: float) -> int:
        offered = self._memory
        connected = self._dial()
        if not self._local_name:
            self._memory = offered = None
        self._greeting = connected
        if self._closing.is_set():  # `close` may have read `_greeting` before
            hang_up(connected)
        try:
            return self._greet(connected, greeting_seconds)
        except OSError:
            connected.close()
            if offered is None or self._memory is not None:
                raise
        except BaseException:
            connected.close()
            raise
        return self._open_once(greeting_seconds)  # without sharing the memory, which could not be mapped

    def _dial(self) -> socket.socket:
        """Connect through the Unix socket if the server is on this host, otherwise over TCP."""
        settings = self._settings
        timeout_seconds = min(GREETING_SECONDS, settings.deadline_seconds)
        if self._local_name:
            try:
                connected = dial_here(
                    self._local_name,
                    timeout_seconds=timeout_seconds,
                    buffer_bytes=settings.socket_buffer_bytes,
                )
            except OSError as error:
                # The server is on this host, and its process may be gone. Over TCP the session could not
                # share memory, and whether a session shares memory must not change.
                if self._reached_here:
                    raise
                if settings.transport == "shared_memory":
                    raise self._not_here(str(error)) from error
                _log.debug(
                    "parameter server %s is not on this host (%s): data is sent over TCP",
                    self.endpoint,
                    error,
                )
                self._local_name = ""
            else:
                self._reached_here = True
                return connected
        elif settings.transport == "shared_memory":
            raise self._not_here("it does not listen on a Unix socket")
        host, _ = split_endpoint(self.endpoint)
        connected = dial(
            host, self._port, timeout_seconds=timeout_seconds, buffer_bytes=settings.socket_buffer_bytes
        )
        return connected if self._certificates is None else TlsSocket(connected, self._certificates, host)

    def _not_here(self, reason: str) -> ConfigurationError:
        return ConfigurationError(
            f"strategy.transport is 'shared_memory', but parameter server {self.endpoint} cannot be reached "
            f"that way: {reason}; expected a server on this host, run by the same user with the same "
            "strategy. With 'auto', servers on other hosts are reached over TCP"
        )

    def _greet(self, connected: socket.socket, timeout_seconds: float) -> int:
        descriptors = [self._memory.descriptor] if self._memory is not None else []
        directions, theirs = greet(
            connected,
            self._identity,
            replace(self._hello, taken=self.stream.taken, shared=bool(descriptors)),
            self.codec.block_bytes,
            descriptors=descriptors,
            share=self._share,
            timeout_seconds=timeout_seconds,
            key=self._key,
            row_bytes=self._row_bytes,
        )
        self._greeting = None  # the stream owns the socket from here on
        return self.stream.attach(connected, directions, theirs.taken)

    def _share(self, theirs: Hello, descriptors: Sequence[int]) -> bool:
        """Return whether memory is shared, which the session's first connection decides."""
        shares = theirs.shared and self._memory is not None
        shared = isinstance(self.transport, SharedMemoryTransport)
        if self._greeted and shares != shared:
            raise RemoteProtocolError(
                f"parameter server {self.endpoint} shared memory on one connection of the session and not on "
                "another"
            )
        if shares and not shared and self._memory is not None:
            try:
                self.transport = self._shared_transport(self._memory, descriptors)
            except OSError:
                self._memory = None  # the next connection does not share memory
                raise
        if not shares:
            self._memory = None
        self._greeted = True
        return shares

    def _shared_transport(self, own: SharedBlocks, descriptors: Sequence[int]) -> SharedMemoryTransport:
        """Map the server's values; raise OSError if this fails or no descriptor has arrived."""
        if not descriptors:
            raise OSError("the server's greeting came without the descriptor of its memory")
        values = SharedBlocks.receive(descriptors[0], self.codec.block_bytes, writable=False)
        return SharedMemoryTransport(self.stream, self.codec, own, values, copies=True)

    def _make_memory(self) -> SharedBlocks | None:
        if not self._local_name:
            return None
        try:
            return SharedBlocks.create(self.codec.block_bytes)
        except OSError as error:
            _log.debug("no memory to share with parameter server %s: %s", self.endpoint, error)
            return None
