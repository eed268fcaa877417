"""A trainer's end of its session with one server, whichever data connection carries it.

A connection that breaks while the server lives is opened again, by a thread of its own: the training thread
only notices that it waits longer. Whether the server lives is the heartbeat's business to say.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from fleet import progress
from fleet.errors import (
    ConfigurationError,
    DeadlineExceededError,
    FleetError,
    PeerLostError,
    RemoteProtocolError,
)
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.transport.connection import BrokenConnectionError
from fleet.parameter_server.transport.exchange import Exchange
from fleet.parameter_server.transport.handshake import GREETING_SECONDS, NotGreetedError, greet
from fleet.parameter_server.transport.line import Line
from fleet.parameter_server.transport.local_sockets import dial_here
from fleet.parameter_server.transport.shared_memory import copy_bytes
from fleet.parameter_server.transport.sockets import BytesMoved, dial, hang_up
from fleet.parameter_server.transport.wire_form import WireForm
from fleet.parameter_server.waiting import WaitLog, split_endpoint
from fleet.transpiler.config import DistributedMode
from fleet.transpiler.lowering import PlannedBlock, TrainerPlan
from fleet.wire import HEADER_BYTES, Header, Hello, Identity, Kind, Side
from fleet.wire.messages import read_error, read_numbers

if TYPE_CHECKING:
    from fleet.parameter_server.control.proto import control_pb2
    from fleet.parameter_server.trainer.parameters import ParameterStore

__all__ = ["Peer", "PeerOwner"]

_FIRST_PAUSE_SECONDS: Final = 0.25
_LONGEST_PAUSE_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.05
_FAREWELL_SECONDS: Final = 1.0
_QUESTION_AFTER: Final = 2 / 5
"""After what part of the time in which nothing arrives the server is asked for a word."""
_log = logging.getLogger(__name__)


class PeerOwner(Protocol):
    """The session, as its connections see it."""

    def landed(self, block: int, step: int, *, changed: bool) -> None:
        """Take note of a block's answer."""

    def lost(self, server: int, error: FleetError) -> None:
        """Take note that a server's connection broke; the peer is about to open another one."""

    def regained(self, server: int) -> None:
        """Take note that there is a connection again."""

    def ended(self, error: FleetError | None) -> None:
        """Take note that nothing more comes from a server: well, or for a reason."""

    def lived(self, server: int) -> float:
        """Return up to when a server is known to have lived, by the monotonic clock."""

    def check(self) -> None:
        """Raise what the session has failed of."""


class Peer:
    """One server, as a trainer is connected with it."""

    def __init__(
        self,
        plan: TrainerPlan,
        server: int,
        identity: Identity,
        store: "ParameterStore",
        owner: PeerOwner,
        settings: Settings,
    ) -> None:
        self.server = server
        self.blocks: Mapping[int, PlannedBlock] = {block.id: block for block in plan.blocks_on(server)}
        self.endpoint = plan.endpoints[server]
        self._identity = identity
        self._store = store
        self._in_step = plan.mode is DistributedMode.SYNC and plan.custom is None
        self._form = WireForm(self.blocks.values(), settings.wire_dtype)
        self._owner = owner
        self._session = secrets.token_hex(8)
        self._line = Line(f"parameter server {self.endpoint}", Side.TRAINER, identity, self)
        self._settings = settings
        self._incarnation = ""
        self._port = 0
        self._name = ""
        """The Unix socket on which the server listens for processes of its host; empty for TCP."""
        self._reached_here = False
        self._exchange: Exchange | None = None
        self._shares: bool | None = None
        """Whether memory is shared; None before the first greeting."""
        self._completed = False
        self.completed_trainers: frozenset[int] = frozenset()
        """The trainers that had completed with this server when it heard that this one has."""
        self._greeting: socket.socket | None = None
        """What connects with the server, as long as that has not greeted."""
        self._closing = threading.Event()
        self._moved: BytesMoved | None = None
        self._moved_at = 0.0
        self._asked = False

    def connect(self, reply: "control_pb2.JoinReply") -> None:
        """Open the first data connection, and greet.

        Raises
        ------
        PeerLostError
            There is none to be had; as often as the settings say.
        FleetError
            The server refuses.
        ConfigurationError
            Memory is to be shared with it, and it is not on this host.
        """
        self._incarnation, self._port = reply.incarnation, reply.data_port
        if self._settings.transport != "tcp":
            self._name = reply.data_socket
        if self._name:
            self._exchange = self._make_exchange()
        self._open_in_turns()
        if self._settings.transport == "shared_memory" and not self._shares:
            raise self._not_here("it shares no memory")

    def send(self, kind: Kind, payload: bytes | memoryview = b"", **fields: int) -> int:
        """Enqueue a frame; return how many there are now."""
        return self._line.send(kind, payload, shared=False, **fields)

    def send_gradient(self, block: int, payload: memoryview, step: int) -> None:
        """Enqueue a gradient; its memory must not change until the server has it."""
        exchange = self._exchange if self._shares else None
        shared = exchange is not None and exchange.put(block, payload)
        travelling = b"" if shared else self._form.leaving(block, payload)
        frame = self._line.send(Kind.GRAD, travelling, shared=shared, step=step, block=block)
        if exchange is not None:
            exchange.sent(block, frame)

    def wait_until_taken(self, count: int, timeout_seconds: float) -> bool:
        """Wait a while for the server to have the first `count` frames; return whether it has."""
        return self._line.wait_until_taken(count, timeout_seconds)

    def look(self, now: float) -> None:
        """End a connection that carries nothing any more, though nobody was told so.

        The server is asked for a word when nothing has arrived for a while. Only where the system tells how
        many bytes have moved: inside of a large frame nothing else does.

        Parameters
        ----------
        now : float
            By the monotonic clock.
        """
        moved, limit = self._line.bytes_moved(), self._settings.silent_seconds
        if moved is None or self._moved is None or _is_alive(self._moved, moved):
            self._moved, self._moved_at, self._asked = moved, now, False
            return
        idle = now - self._moved_at
        if not self._asked and idle >= limit * _QUESTION_AFTER:
            self._asked = True
            self.send(Kind.CONFIRM)
        elif self._asked and idle >= limit:
            _log.warning(
                "the data connection with parameter server %s has carried nothing for %.0f s, not even an "
                "answer; giving it up",
                self.endpoint,
                idle,
            )
            self._moved = None
            self._line.hang_up()

    def close(self) -> None:
        """End the session: with what is enqueued where it has come to its end, else at once."""
        self._closing.set()
        greeting = self._greeting
        if greeting is not None:
            hang_up(greeting)
        if self._completed:
            self._line.finish(_FAREWELL_SECONDS)
        else:
            self._line.close()

    # What the line reports.

    def destination(self, header: Header) -> memoryview | None:
        """Say where a value belongs that follows its header."""
        if header.kind is Kind.PARAM and not header.shared:
            return self._form.landing(header.block, self._store.landing(header.block))
        return None

    def received(self, header: Header, payload: memoryview) -> None:
        """Pass on that a value has landed."""
        if header.kind is Kind.ERROR:
            raise read_error(bytes(payload))
        if header.kind is Kind.COMPLETE:
            self.completed_trainers = frozenset(read_numbers(bytes(payload)))
            self._completed = True
            self.send(Kind.GOODBYE)
        elif header.kind in (Kind.PARAM, Kind.UNCHANGED):
            if header.kind is Kind.PARAM and not header.shared:
                self._form.landed(header.block, self._store.landing(header.block))
            if self._exchange is not None:
                self._exchange.answered(header.block, header.taken)
                if header.shared:
                    self._take_shared(header.block, self._exchange.value(header.block))
            self._owner.landed(header.block, header.step, changed=header.kind is Kind.PARAM)

    def ended(self, error: FleetError | None) -> None:
        """Open another connection for one that broke; pass any other end on."""
        if self._closing.is_set():
            return
        if not isinstance(error, BrokenConnectionError):
            self._owner.ended(error)
            return
        _log.warning("%s; connecting again", error)
        self._owner.lost(self.server, error)
        name = f"fleet-reconnect {self.endpoint}"
        threading.Thread(target=self._reconnect, name=name, daemon=True).start()

    def _reconnect(self) -> None:
        try:
            resent = self._open_in_turns(self._lives_since)
        except FleetError as error:
            if not self._closing.is_set():
                self._owner.ended(error)
            return
        progress.count("reconnections", 1)
        progress.count("frames_resent", resent)
        _log.warning(
            "the data connection with parameter server %s is back; %d frames were sent again",
            self.endpoint,
            resent,
        )
        self._owner.regained(self.server)

    def _lives_since(self, since: float) -> bool:
        """Wait until the server is known to have lived later than that; FleetError when it never will.

        Returns
        -------
        bool
            False where this end closes meanwhile.
        """
        while self._owner.lived(self.server) <= since:
            self._owner.check()
            if self._closing.wait(_LOOK_SECONDS):
                return False
        self._owner.check()  # in another life it answers as well
        return True

    def _open_in_turns(self, lives_since: Callable[[float], bool] | None = None) -> int:
        """Open a connection, at once and then after ever longer pauses; return how many frames are resent.

        A server that lives and does not greet is busy, with a long step say. That counts as no try: it greets
        once it has taken the frame that keeps it, and is awaited as long as any other peer that lives.

        Parameters
        ----------
        lives_since : callable, optional
            Given when a try has failed; waits for a later sign of life. Without one there is no other try,
            and no verdict either: what became of the server is the heartbeat's to find. None before the
            first connection, when the server has just let this trainer join.
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
            if tried < tries and self._closing.wait(pause):
                break
            if lives_since is not None and not lives_since(time.monotonic()):
                break
            if busy:
                greeting_seconds *= 2
                self._await_greeting(log)
        known = "it let this trainer join" if lives_since is None else "it answers calls"
        raise PeerLostError(
            f"no data connection to parameter server {self.endpoint}, port {self._port}: {failure}; tried "
            f"{tried} {'times' if tried > 1 else 'time'} (FLAGS_rpc_retry_times), though {known}"
        ) from failure

    def _await_greeting(self, log: WaitLog) -> None:
        """Say that a server that lives has not greeted; DeadlineExceededError once it keeps too long."""
        what = f"parameter server {self.endpoint}, which answers calls, to greet a new data connection"
        waited = log.note(self.endpoint, lambda: f"waiting for {what}")
        if waited >= self._settings.stalled_seconds:
            raise DeadlineExceededError(f"waited {waited:.0f} s for {what}")

    def _open(self, greeting_seconds: float) -> int:
        """Open a data connection, greet, and go on over it; return how many frames are sent again."""
        offered = self._exchange
        connected = self._dial()
        self._greeting = connected
        if self._closing.is_set():  # `close` may have looked before
            hang_up(connected)
        try:
            return self._greet(connected, greeting_seconds)
        except OSError:
            connected.close()
            if offered is None or self._exchange is not None:
                raise
        except BaseException:
            connected.close()
            raise
        return self._open(greeting_seconds)  # without the memory that could not be mapped

    def _dial(self) -> socket.socket:
        """Connect by the Unix socket where the server is on this host, else by TCP."""
        settings = self._settings
        timeout_seconds = min(GREETING_SECONDS, settings.deadline_seconds)
        if self._name:
            try:
                connected = dial_here(
                    self._name,
                    timeout_seconds=timeout_seconds,
                    buffer_bytes=settings.socket_buffer_bytes,
                )
            except OSError as error:
                if self._reached_here:
                    raise
                self._stay_with_tcp(str(error))
            else:
                self._reached_here = True
                return connected
        elif settings.transport == "shared_memory":
            raise self._not_here("it listens for no process of its host")
        host, _ = split_endpoint(self.endpoint)
        return dial(
            host, self._port, timeout_seconds=timeout_seconds, buffer_bytes=settings.socket_buffer_bytes
        )

    def _take_shared(self, block: int, value: memoryview) -> None:
        """Take a value from the server's memory.

        In sync mode it lies there unchanged until this trainer has sent the next gradient, and before that
        it is adopted: so it can wait there. Any other mode may change it as soon as its frame is taken.
        """
        if self._in_step:
            self._store.lies(block, value)
        else:
            copy_bytes(value, self._store.landing(block))

    def _make_exchange(self) -> Exchange | None:
        try:
            return Exchange(self._form.block_bytes)
        except OSError as error:
            _log.debug("no memory to share with parameter server %s: %s", self.endpoint, error)
            return None

    def _stay_with_tcp(self, reason: str) -> None:
        if self._settings.transport == "shared_memory":
            raise self._not_here(reason)
        _log.debug("parameter server %s is not on this host (%s): data goes over TCP", self.endpoint, reason)
        self._name, self._exchange = "", None

    def _not_here(self, reason: str) -> ConfigurationError:
        return ConfigurationError(
            f"strategy.transport is 'shared_memory', and parameter server {self.endpoint} cannot be reached "
            f"so: {reason}; expected a server on this host, of the same user, with the same strategy. With "
            "'auto' what is elsewhere is reached over TCP"
        )

    def _greet(self, connected: socket.socket, timeout_seconds: float) -> int:
        exchange = self._exchange
        descriptors = [exchange.descriptor] if exchange is not None else []
        ours = Hello(self._incarnation, len(self.blocks), self._session, self._line.taken, bool(descriptors))
        directions, theirs = greet(
            connected,
            self._identity,
            ours,
            self._form.block_bytes,
            descriptors=descriptors,
            share=self._share,
            timeout_seconds=timeout_seconds,
        )
        self._greeting = None  # the line's from here on
        return self._line.attach(connected, directions, theirs.taken)

    def _share(self, theirs: Hello, descriptors: Sequence[int]) -> bool:
        """Settle whether memory is shared, once for the session."""
        shares = theirs.shared and self._exchange is not None
        if self._shares not in (None, shares):
            raise RemoteProtocolError(
                f"parameter server {self.endpoint} shared memory on one connection of the session and not on "
                "another"
            )
        if shares and self._exchange is not None:
            try:
                self._exchange.map_values(descriptors)
            except OSError:
                self._exchange = None  # the next connection goes without
                raise
        if not shares:
            self._exchange = None
        self._shares = shares
        return shares


def _is_alive(before: BytesMoved, now: BytesMoved) -> bool:
    """Whether more has moved than that the kernel at the other end took the question for a word."""
    return now.received != before.received or now.acknowledged - before.acknowledged > HEADER_BYTES
