"""A trainer's end of its data connection with one server."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from fleet.errors import FleetError, PeerLostError
from fleet.parameter_server.connection import Connection, read_frame
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.sockets import dial, send_all
from fleet.parameter_server.waiting import split_endpoint
from fleet.transpiler.lowering import PlannedBlock, TrainerPlan
from fleet.wire import HEADER_BYTES, Conversation, Header, Hello, Identity, Kind, Side, pack_header
from fleet.wire.messages import pack_hello, read_error, read_hello

if TYPE_CHECKING:
    from fleet.parameter_server.proto import control_pb2

__all__ = ["Peer", "PeerOwner"]

_GREETING_SECONDS: Final = 10.0


class PeerOwner(Protocol):
    """The session, as its connections see it."""

    def landed(self, block: int, step: int, *, changed: bool) -> None:
        """Take note of a block's answer."""

    def ended(self, server: int, error: FleetError | None) -> None:
        """Take note that a server's connection ended: well, or for a reason."""


class Peer:
    """One server, as a trainer is connected with it."""

    def __init__(
        self,
        plan: TrainerPlan,
        server: int,
        identity: Identity,
        landing: Callable[[int], memoryview],
        owner: PeerOwner,
    ) -> None:
        self.server = server
        self.blocks: Mapping[int, PlannedBlock] = {block.id: block for block in plan.blocks_on(server)}
        self.endpoint = plan.endpoints[server]
        self._identity = identity
        self._landing = landing
        self._owner = owner
        self._connection: Connection | None = None

    def connect(self, reply: "control_pb2.JoinReply", settings: Settings) -> None:
        """Open the data connection and greet."""
        host, _ = split_endpoint(self.endpoint)
        sizes = {block: len(self._landing(block)) for block in self.blocks}
        sending = Conversation(Side.TRAINER, self._identity, sizes, remote=False)
        receiving = Conversation(Side.SERVER, self._identity, sizes, remote=True)
        hello = pack_hello(Hello(reply.incarnation, len(self.blocks)))
        header = self._header(Kind.HELLO, hello)
        sending.advance(header)
        try:
            connected = dial(
                host,
                reply.data_port,
                timeout_seconds=_GREETING_SECONDS,
                buffer_bytes=settings.socket_buffer_bytes,
            )
            send_all(connected, [pack_header(header), hello])
            answer, payload = read_frame(connected, memoryview(bytearray(HEADER_BYTES)), receiving)
        except OSError as error:
            raise PeerLostError(
                f"no data connection to parameter server {self.endpoint}, port {reply.data_port}: {error}"
            ) from error
        if answer.kind is Kind.ERROR:
            raise read_error(bytes(payload))
        read_hello(bytes(payload))
        connected.settimeout(None)
        peer = f"parameter server {self.endpoint}"
        self._connection = Connection(connected, peer, sending, receiving, self)

    def start(self) -> None:
        """Start the connection's threads."""
        if self._connection is not None:
            self._connection.start()

    def send(self, kind: Kind, payload: bytes | memoryview = b"", **fields: int) -> None:
        """Enqueue a frame."""
        if self._connection is not None:
            self._connection.send(self._header(kind, payload, **fields), payload)

    def flushed(self, timeout_seconds: float) -> bool:
        """Wait a while for all frames to be on their way; return whether they are."""
        return self._connection is None or self._connection.flushed(timeout_seconds)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def destination(self, header: Header) -> memoryview | None:
        """Say where a value belongs."""
        return self._landing(header.block) if header.kind is Kind.PARAM else None

    def received(self, header: Header, payload: memoryview) -> None:
        """Pass on that a value has landed."""
        if header.kind is Kind.ERROR:
            raise read_error(bytes(payload))
        if header.kind in (Kind.PARAM, Kind.UNCHANGED):
            self._owner.landed(header.block, header.step, changed=header.kind is Kind.PARAM)

    def ended(self, error: FleetError | None) -> None:
        """Pass the end on."""
        self._owner.ended(self.server, error)

    def _header(self, kind: Kind, payload: bytes | memoryview, **fields: int) -> Header:
        identity = self._identity
        return Header(
            kind, identity.job, identity.attempt, identity.trainer, payload_bytes=len(payload), **fields
        )
