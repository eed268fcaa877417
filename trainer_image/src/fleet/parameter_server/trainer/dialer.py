"""Opening the data connections of a trainer's session with one server, the first one and any later one."""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from fleet.errors import DeadlineExceededError, PeerLostError, RemoteProtocolError
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer.route import Route
from fleet.parameter_server.transport.block_transport import (
    BlockTransport,
    Codec,
    SharedMemoryTransport,
    StreamTransport,
)
from fleet.parameter_server.transport.handshake import GREETING_SECONDS, NotGreetedError, greet
from fleet.parameter_server.transport.shared_memory import SharedBlocks
from fleet.parameter_server.transport.sockets import hang_up
from fleet.parameter_server.transport.stream import ResumableStream
from fleet.parameter_server.waiting import WaitLog
from fleet.wire import NO_TABLES, Hello, Identity

__all__ = ["Dialer"]

_FIRST_PAUSE_SECONDS: Final = 0.25
_LONGEST_PAUSE_SECONDS: Final = 5.0
_log = logging.getLogger(__name__)


class Dialer:
    """Opens connections until it is closed, makes the handshake, and attaches them to the stream.

    Parameters
    ----------
    route : Route
    identity : Identity
    incarnation : str
        The life of the server that this trainer has joined.
    stream : ResumableStream
    codec : Codec
    settings : Settings
    row_bytes : mapping of int to int
        How many bytes a row of each table has.
    """

    def __init__(
        self,
        route: Route,
        identity: Identity,
        incarnation: str,
        stream: ResumableStream,
        codec: Codec,
        settings: Settings,
        row_bytes: Mapping[int, int] = NO_TABLES,
    ) -> None:
        self.transport: BlockTransport = StreamTransport(stream, codec)
        """How blocks travel; settled by the first handshake."""
        self.closing = threading.Event()
        self._route = route
        self._identity = identity
        self._hello = Hello(incarnation, len(codec.block_bytes), secrets.token_hex(8))
        self._stream = stream
        self._codec = codec
        self._row_bytes = row_bytes
        self._settings = settings
        self._memory = self._make_memory()
        """Offered to be shared; None where there is none, or not any more."""
        self._greeted = False
        self._greeting: socket.socket | None = None
        """What connects with the server, as long as that has not greeted."""

    @property
    def endpoint(self) -> str:
        """Whom it dials."""
        return self._route.endpoint

    def open(self, lives_since: Callable[[float], bool] | None = None) -> int:
        """Open a connection, at once and then after ever longer pauses; return how many frames are resent.

        A server that lives and does not greet is busy, with a long step say. That counts as no try: it greets
        once it has taken the frame that keeps it, and is awaited as long as any other peer that lives.

        Parameters
        ----------
        lives_since : callable, optional
            Given when a try has failed; waits for a later sign of life. Without one there is no other try,
            and no verdict either: what became of the server is the heartbeat's to find. None before the
            first connection, when the server has just let this trainer join.

        Raises
        ------
        PeerLostError
            There is none to be had; as often as the settings say.
        FleetError
            The server refuses.
        ConfigurationError
            Memory is to be shared with it, and it is not on this host.
        """
        tries, tried = self._settings.retry_times + 1, 0
        greeting_seconds, log = GREETING_SECONDS, WaitLog()
        while tried < tries:
            pause = min(_FIRST_PAUSE_SECONDS * 2**tried, _LONGEST_PAUSE_SECONDS)
            try:
                return self._open(min(greeting_seconds, self._settings.deadline_seconds))
            except (OSError, RemoteProtocolError) as error:
                failure = error
            busy = lives_since is not None and isinstance(failure, NotGreetedError)
            tried += not busy
            if tried < tries and self.closing.wait(pause):
                break
            if lives_since is not None and not lives_since(time.monotonic()):
                break
            if busy:
                greeting_seconds *= 2
                self._await_greeting(log)
        known = "it let this trainer join" if lives_since is None else "it answers calls"
        raise PeerLostError(
            f"no data connection to parameter server {self._route.endpoint}, port {self._route.port}: "
            f"{failure}; tried {tried} {'times' if tried > 1 else 'time'} (FLAGS_rpc_retry_times), though "
            f"{known}"
        ) from failure

    def check_shares(self) -> None:
        """Check that memory is shared where the settings want it.

        Raises
        ------
        ConfigurationError
            It is not.
        """
        shares = isinstance(self.transport, SharedMemoryTransport)
        if self._settings.transport == "shared_memory" and not shares:
            raise self._route.not_here("it shares no memory")

    def close(self) -> None:
        """Open no connection any more, and give up one that is being greeted."""
        self.closing.set()
        greeting = self._greeting
        if greeting is not None:
            hang_up(greeting)

    def _await_greeting(self, log: WaitLog) -> None:
        """Say that a server that lives has not greeted; DeadlineExceededError once it keeps too long."""
        endpoint = self._route.endpoint
        what = f"parameter server {endpoint}, which answers calls, to greet a new data connection"
        waited = log.note(endpoint, lambda: f"waiting for {what}")
        if waited >= self._settings.stalled_seconds:
            raise DeadlineExceededError(f"waited {waited:.0f} s for {what}")

    def _open(self, greeting_seconds: float) -> int:
        """Open a data connection, greet, and go on over it; return how many frames are sent again."""
        offered = self._memory
        connected = self._route.dial()
        if not self._route.stays_here:
            self._memory = offered = None
        self._greeting = connected
        if self.closing.is_set():  # `close` may have looked before
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
        return self._open(greeting_seconds)  # without the memory that could not be mapped

    def _greet(self, connected: socket.socket, timeout_seconds: float) -> int:
        descriptors = [self._memory.descriptor] if self._memory is not None else []
        hello = self._hello
        directions, theirs = greet(
            connected,
            self._identity,
            Hello(hello.incarnation, hello.num_blocks, hello.session, self._stream.taken, bool(descriptors)),
            self._codec.block_bytes,
            descriptors=descriptors,
            share=self._share,
            timeout_seconds=timeout_seconds,
            key=self._route.key,
            row_bytes=self._row_bytes,
        )
        self._greeting = None  # the stream's from here on
        return self._stream.attach(connected, directions, theirs.taken)

    def _share(self, theirs: Hello, descriptors: Sequence[int]) -> bool:
        """Settle whether memory is shared, once for the session."""
        shares = theirs.shared and self._memory is not None
        shared = isinstance(self.transport, SharedMemoryTransport)
        if self._greeted and shares != shared:
            raise RemoteProtocolError(
                f"parameter server {self._route.endpoint} shared memory on one connection of the session and "
                "not on another"
            )
        if shares and not shared and self._memory is not None:
            try:
                self.transport = self._shared_transport(self._memory, descriptors)
            except OSError:
                self._memory = None  # the next connection goes without
                raise
        if not shares:
            self._memory = None
        self._greeted = True
        return shares

    def _shared_transport(self, own: SharedBlocks, descriptors: Sequence[int]) -> SharedMemoryTransport:
        """Map the server's values; OSError where they cannot be, or where a system keeps their descriptor."""
        if not descriptors:
            raise OSError("the descriptor of the server's memory did not come with its greeting")
        values = SharedBlocks.receive(descriptors[0], self._codec.block_bytes, writable=False)
        return SharedMemoryTransport(self._stream, self._codec, own, values, copies=True)

    def _make_memory(self) -> SharedBlocks | None:
        if not self._route.stays_here:
            return None
        try:
            return SharedBlocks.create(self._codec.block_bytes)
        except OSError as error:
            _log.debug("no memory to share with parameter server %s: %s", self._route.endpoint, error)
            return None
