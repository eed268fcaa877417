"""The frame protocol: headers, the states of a connection, and the validation of every frame.

A header has 52 bytes, little endian, and the same layout in both directions.

=======  =====  ==========================================================================
offset   bytes  field
=======  =====  ==========================================================================
0        4      magic ``FLET``
4        1      version of the protocol
5        1      kind of the frame
6        2      1 if the payload is in shared memory and does not follow the header; else 0
8        4      attempt: the start count of the trainer's process
12       4      trainer id
16       4      number of the block or table; ``NO_BLOCK`` if the frame concerns neither
20       8      job hash, which identifies frames of another job
28       8      step
36       8      number of the session's frames that the sender has received from the other end
44       8      payload bytes that follow the header
=======  =====  ==========================================================================

Each direction of a connection is a separate state machine, advanced by the frames in that direction. The
protocol never makes one direction wait for the other: the training mode decides what a side answers and when,
and frames in opposite directions may cross in transit. A frame whose kind is not listed for the current state
violates the protocol.

The session survives if a connection breaks while both processes are alive. The next connection begins with a
greeting, like every connection. Each direction then continues in the state after the last frame that arrived,
which is one of `RESUMED`; later frames are resent.
"""

import enum
import hashlib
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from fleet.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from fleet.wire.messages import MAX_TEXT_BYTES
from fleet.wire.rows import payload_bounds

__all__ = [
    "HEADER_BYTES",
    "NO_BLOCK",
    "NO_TABLES",
    "RESUMED",
    "TENSORS",
    "TRANSITIONS",
    "VERSION",
    "Conversation",
    "Header",
    "Identity",
    "Kind",
    "Side",
    "State",
    "job_hash",
    "pack_header",
    "read_header",
]

MAGIC: Final = b"FLET"
VERSION: Final = 4
NO_BLOCK: Final = 0xFFFFFFFF
_HEADER: Final = struct.Struct("<4sBBHIIIQQQQ")
HEADER_BYTES: Final = _HEADER.size


class Kind(enum.IntEnum):
    """The kind of a frame."""

    __hash__ = int.__hash__  # several look-ups for each frame, and the hash of an enum is a call in Python

    HELLO = 1
    """The first frame of each side, which names the session and the incarnation of the server."""
    PULL = 2
    """A trainer's request for all values of the server; in sync mode, for the values at the header's step."""
    HYPER = 3
    """The hyper-parameters of a step; precedes its first gradient."""
    GRAD = 4
    """One block's gradient for a step."""
    STEP_END = 5
    """The end of a trainer's step; the payload lists the blocks for which it had no gradient."""
    PARAM = 6
    """One block's value after a step."""
    UNCHANGED = 7
    """Notice that a block keeps its value after a step, because no trainer had a gradient for the block."""
    COMPLETE = 8
    """Notice that a trainer has completed; the server's reply of the same kind lists all such trainers."""
    ERROR = 9
    """The type and message of an error of the sender, which then closes the connection."""
    CONFIRM = 10
    """A trainer's request to confirm all earlier frames; the server answers with the same kind.

    While a gradient waits for a receive buffer, the server also sends this kind without a request.
    """
    GOODBYE = 11
    """Notice that the trainer has received the server's COMPLETE, so the session is no longer needed."""
    LOOK_UP = 12
    """A trainer's request for a table's rows by id; in sync mode, for the rows at the header's step."""
    ROWS = 13
    """The requested rows, in the order of their ids; look-ups are answered in order of arrival."""
    ROW_GRADIENT = 14
    """One table's gradient for a step: ids and their rows; empty if no row on the server has a gradient."""
    STEPPED = 15
    """Notice that a table has been updated: later look-ups return its rows after that step.

    If the trainer holds a copy of the table, the payload has the ids and values of the changed rows.
    Otherwise it is empty.
    """


class Side(enum.Enum):
    """The sender of the frames in one direction of a connection."""

    TRAINER = "trainer"
    SERVER = "parameter server"


class State(enum.Enum):
    """The state of one direction of a connection."""

    __hash__ = object.__hash__  # as for `Kind`; members are singletons

    START = "start"
    """Nothing has been sent yet."""
    OPEN = "open"
    """The greeting has been sent, and no step is in progress."""
    IN_STEP = "in step"
    """The hyper-parameters of a step have been sent; its gradients follow."""
    COMPLETED = "completed"
    """The sender has completed successfully. A server sends nothing more, and a trainer only its GOODBYE."""
    CLOSED = "closed"
    """The sender has sent GOODBYE or ERROR, and sends nothing more."""


TRANSITIONS: Final[Mapping[Side, Mapping[State, Mapping[Kind, State]]]] = MappingProxyType(
    {
        Side.TRAINER: {
            State.START: {Kind.HELLO: State.OPEN, Kind.ERROR: State.CLOSED},
            State.OPEN: {
                Kind.PULL: State.OPEN,
                Kind.LOOK_UP: State.OPEN,
                Kind.HYPER: State.IN_STEP,
                Kind.CONFIRM: State.OPEN,
                Kind.COMPLETE: State.COMPLETED,
                Kind.ERROR: State.CLOSED,
            },
            State.IN_STEP: {
                Kind.GRAD: State.IN_STEP,
                Kind.LOOK_UP: State.IN_STEP,
                Kind.ROW_GRADIENT: State.IN_STEP,
                Kind.CONFIRM: State.IN_STEP,
                Kind.STEP_END: State.OPEN,
                Kind.ERROR: State.CLOSED,
            },
            State.COMPLETED: {Kind.CONFIRM: State.COMPLETED, Kind.GOODBYE: State.CLOSED},
            State.CLOSED: {},
        },
        Side.SERVER: {
            State.START: {Kind.HELLO: State.OPEN, Kind.ERROR: State.CLOSED},
            State.OPEN: {
                Kind.PARAM: State.OPEN,
                Kind.UNCHANGED: State.OPEN,
                Kind.ROWS: State.OPEN,
                Kind.STEPPED: State.OPEN,
                Kind.CONFIRM: State.OPEN,
                Kind.COMPLETE: State.COMPLETED,
                Kind.ERROR: State.CLOSED,
            },
            State.COMPLETED: {},
            State.CLOSED: {},
        },
    }
)

RESUMED: Final[Mapping[Side, frozenset[State]]] = MappingProxyType(
    {
        Side.TRAINER: frozenset({State.OPEN, State.IN_STEP, State.COMPLETED}),
        Side.SERVER: frozenset({State.OPEN}),
    }
)
"""The states in which a direction may continue after the greeting on a later connection."""

NO_TABLES: Final[Mapping[int, int]] = MappingProxyType({})
"""The row sizes of a connection without tables."""
_KINDS: Final = {int(kind): kind for kind in Kind}
TENSORS: Final = frozenset({Kind.GRAD, Kind.PARAM})
"""The kinds whose payload is the tensor of a block."""
_OF_A_BLOCK: Final = frozenset({Kind.GRAD, Kind.PARAM, Kind.UNCHANGED})
_OF_A_TABLE: Final = frozenset({Kind.LOOK_UP, Kind.ROWS, Kind.ROW_GRADIENT, Kind.STEPPED})
_OF_A_STEP: Final = frozenset({Kind.GRAD, Kind.ROW_GRADIENT, Kind.STEP_END})
_NOTHING: Final = (1, 0, 1)
"""The bounds for an unknown table; no payload size satisfies them."""
_BYTES_PER_NUMBER: Final = 4
_MAX_TRAINERS: Final = 1 << 16


class Header(NamedTuple):
    """The header of a frame; ``step`` is zero and ``block`` is ``NO_BLOCK`` for kinds without them.

    ``taken`` may be out of date, because it is set when the frame is enqueued. If ``shared`` is True, the
    block's bytes are in the block's region of shared memory, and nothing follows the header.
    """

    kind: Kind
    job: int
    attempt: int
    trainer: int
    step: int = 0
    block: int = NO_BLOCK
    taken: int = 0
    payload_bytes: int = 0
    shared: bool = False


class Identity(NamedTuple):
    """The fields that are equal in all frames of a connection: the job, the trainer and its attempt."""

    job: int
    trainer: int
    attempt: int

    def __str__(self) -> str:
        return f"job {self.job:016x}, trainer {self.trainer}, attempt {self.attempt}"


def job_hash(name: str, uid: str) -> int:
    """Return the 64-bit hash that identifies a job in every frame."""
    digest = hashlib.blake2b(f"{name}\n{uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def pack_header(header: Header) -> bytes:
    """Encode a header.

    Raises
    ------
    LocalProtocolError
        A value does not fit the width of its field; the message gives the header.
    """
    kind, job, attempt, trainer, step, block, taken, payload_bytes, shared = header
    try:
        return _HEADER.pack(
            MAGIC, VERSION, kind, shared, attempt, trainer, block, job, step, taken, payload_bytes
        )
    except struct.error as error:
        raise LocalProtocolError(f"a field of {header} does not fit the frame header: {error}") from error


def read_header(received: bytes | bytearray | memoryview) -> Header | None:
    """Decode the header at the front of ``received``; return None if the header is incomplete.

    Raises
    ------
    RemoteProtocolError
        The bytes are not a frame of this protocol; a wrong magic number is detected at its first wrong byte.
    """
    if len(received) < HEADER_BYTES:
        _check_front(received)
        return None
    magic, version, kind, shared, attempt, trainer, block, job, step, taken, payload_bytes = (
        _HEADER.unpack_from(received)
    )
    if magic != MAGIC:
        _check_front(received)
    if version != VERSION:
        raise RemoteProtocolError(
            f"the peer uses version {version} of the frame protocol, and this process uses version "
            f"{VERSION}; run the same version of fleet-trainer in every replica"
        )
    if kind not in _KINDS or shared not in (0, 1):
        raise RemoteProtocolError(
            f"invalid frame header: kind is {kind} and shared is {shared}; expected a kind from 1 to "
            f"{max(_KINDS)}, and shared to be 0 or 1"
        )
    return Header(_KINDS[kind], job, attempt, trainer, step, block, taken, payload_bytes, shared == 1)


def _check_front(received: bytes | bytearray | memoryview) -> None:
    front = bytes(received[: len(MAGIC)])
    if not MAGIC.startswith(front):
        raise RemoteProtocolError(
            f"not a fleet frame: it starts with {front!r}, expected {MAGIC!r}; "
            "is the other end a fleet trainer or parameter server?"
        )


class Conversation:
    """The state machine for one direction of a connection, which validates frames. Not thread-safe.

    Parameters
    ----------
    side : Side
        The sender in this direction.
    identity : Identity
        The identity that every frame must carry.
    block_bytes : mapping of int to int
        The size in bytes of each block's tensor, for the blocks that this connection carries.
    remote : bool
        Whether the peer is the sender. An invalid frame raises `RemoteProtocolError` if it is, and otherwise
        `LocalProtocolError`.
    row_bytes : mapping of int to int
        The size in bytes of each table's rows, for the tables that this connection carries.

    Attributes
    ----------
    state : State
    step : int
        The step that began most recently.
    over : bool
        Whether no further frame is allowed in this direction.
    shares : bool
        Whether tensors may be in shared memory; set after the greetings.
    """

    def __init__(
        self,
        side: Side,
        identity: Identity,
        block_bytes: Mapping[int, int],
        *,
        remote: bool,
        row_bytes: Mapping[int, int] = NO_TABLES,
    ) -> None:
        self.state = State.START
        self.step = 0
        self.over = False
        self.shares = False
        self._side = side
        self._identity = identity
        self._block_bytes = block_bytes
        self._row_bytes = row_bytes
        self._error: type[ProtocolError] = RemoteProtocolError if remote else LocalProtocolError
        self._transitions = TRANSITIONS[side]
        # The payload limit of each kind that carries no tensor; a kind that is not listed has no payload.
        self._max_bytes = dict.fromkeys((Kind.HELLO, Kind.HYPER, Kind.ERROR), MAX_TEXT_BYTES)
        self._max_bytes[Kind.STEP_END] = _BYTES_PER_NUMBER * len(block_bytes)
        if side is Side.SERVER:
            self._max_bytes[Kind.COMPLETE] = _BYTES_PER_NUMBER * _MAX_TRAINERS
        self._table_bounds = {
            (kind, table): (
                *payload_bounds(size, with_ids=kind is not Kind.ROWS, with_rows=kind is not Kind.LOOK_UP),
                size if kind is Kind.ROWS else 1,
            )
            for kind in _OF_A_TABLE
            for table, size in row_bytes.items()
        }
        """The minimum and maximum size of a non-empty payload, and the number that must divide the size."""

    def resume(self, state: State, step: int) -> None:
        """Continue in the final state of an earlier connection; call this directly after the greeting.

        Raises
        ------
        LocalProtocolError
            ``state`` is not in `RESUMED`, or the latest frame in this direction was not the greeting.
        """
        if self.state is not State.OPEN or state not in RESUMED[self._side]:
            raise LocalProtocolError(
                f"a {self._side.value} in the state '{self.state.value}' cannot continue in the state "
                f"'{state.value}'; expected a greeting, and one of "
                f"{', '.join(sorted(each.value for each in RESUMED[self._side]))}"
            )
        self.state, self.step = state, step

    def advance(self, header: Header) -> None:
        """Validate the next frame's header and advance the state.

        Raises
        ------
        RemoteProtocolError, LocalProtocolError
            The frame is not allowed in this state, has a different identity, or has a payload of the wrong
            size. ``remote`` selects the type of the error. The state does not change in this case.
        """
        kind, job, attempt, trainer, step, block, _, size, shared = header
        following = self._transitions[self.state].get(kind)
        if following is None:
            allowed = ", ".join(each.name for each in self._transitions[self.state]) or "no frame"
            raise self._error(
                f"a {self._side.value} sent {kind.name} in the state '{self.state.value}', expected {allowed}"
            )
        if (job, trainer, attempt) != self._identity:
            found = Identity(job, trainer, attempt)
            raise self._error(
                f"a {kind.name} frame has the identity {found}; expected that of this connection, "
                f"{self._identity}"
            )
        if kind in TENSORS:
            fits = size == self._block_bytes.get(block)
        elif kind in _OF_A_TABLE:
            least, most, multiple = bounds = self._table_bounds.get((kind, block), _NOTHING)
            fits = (least <= size <= most and size % multiple == 0) or (not size and bounds is not _NOTHING)
        else:
            fits = block == NO_BLOCK and size <= self._max_bytes.get(kind, 0)
        # The checks above only find out that something is wrong; `_check_payload` finds out what, to name it.
        if shared or not fits:
            self._check_payload(header)
        if kind is Kind.HYPER:
            # Not `<=`: the first step has the number with which a conversation begins.
            if step < self.step:
                raise self._error(f"step {step} begins after step {self.step}, expected a later step")
            self.step = step
        elif kind in _OF_A_STEP and step != self.step:
            raise self._error(
                f"a {kind.name} frame belongs to step {step}, expected the step that has begun, {self.step}"
            )
        if following is not self.state:
            self.state = following
            self.over = not self._transitions[following]

    def _check_payload(self, header: Header) -> None:
        """Validate the block or table that a frame refers to, and the size of the payload."""
        kind, block, found = header.kind, header.block, header.payload_bytes
        if header.shared and not (self.shares and kind in TENSORS):
            raise self._error(
                f"the payload of a {kind.name} frame is in shared memory, expected it after the header: "
                + ("it is not a tensor" if self.shares else "this connection shares no memory")
            )
        if kind in _OF_A_BLOCK:
            if block not in self._block_bytes:
                raise self._error(
                    f"a {kind.name} frame names block {block}, "
                    f"expected one of the {len(self._block_bytes)} blocks of this connection"
                )
            size = self._block_bytes[block] if kind in TENSORS and not header.shared else 0
            if found != size:
                raise self._error(
                    f"a {kind.name} frame of block {block} carries {found} bytes, expected {size}"
                )
        elif kind in _OF_A_TABLE:
            self._check_rows(kind, block, found)
        elif block != NO_BLOCK:
            raise self._error(f"a {kind.name} frame names block {block}, expected none")
        elif found > (most := self._max_bytes.get(kind, 0)):
            expected = f"at most {most}" if most else "0"
            raise self._error(f"a {kind.name} frame carries {found} bytes, expected {expected}")

    def _check_rows(self, kind: Kind, table: int, found: int) -> None:
        """Validate the payload size of a frame about a table; decoding validates the number of ids."""
        if table not in self._row_bytes:
            raise self._error(
                f"a {kind.name} frame names table {table}, "
                f"expected one of the {len(self._row_bytes)} tables of this connection"
            )
        least, most, row_bytes = self._table_bounds[kind, table]
        if found and not (least <= found <= most and found % row_bytes == 0):
            multiple = f"a multiple of {row_bytes}, " if kind is Kind.ROWS else ""
            raise self._error(
                f"a {kind.name} frame of table {table} carries {found} bytes, "
                f"expected {multiple}0 or {least} to {most}"
            )
