"""The frame protocol: headers, the states of a connection, and the check of every frame.

A header has 52 bytes, little endian, and the same layout in both directions.

=======  =====  ==========================================================================
offset   bytes  field
=======  =====  ==========================================================================
0        4      magic ``FLET``
4        1      version of the protocol
5        1      kind of the frame
6        2      1 if the payload is in memory that both ends share, and does not follow; else 0
8        4      attempt: the start count of the trainer's process
12       4      trainer id
16       4      number of the block or table, or ``NO_BLOCK`` if the frame is about none
20       8      job hash, which identifies frames of another job
28       8      step
36       8      number of the session's frames that the sender has received from the other end
44       8      payload bytes that follow the header
=======  =====  ==========================================================================

Each direction of a connection is a state machine of its own, advanced by the frames of that direction. The
two directions never wait for each other here: the training mode decides what a side answers and when, and
frames of both directions cross on the way. A kind that a state does not list breaks the protocol.

A connection that breaks while both processes live leaves the session as it was. The next connection begins
with a greeting, as every connection does. Each direction then continues in the state after its last frame
that arrived, which is one of `RESUMED`; later frames are sent again.
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
    """What a frame says."""

    HELLO = 1
    """First frame of both sides: names the session and the incarnation of the server."""
    PULL = 2
    """A trainer asks for the value of every block of this server: in sync mode that of the header's step."""
    HYPER = 3
    """The hyper-parameters of a step; precedes its first gradient."""
    GRAD = 4
    """One block's gradient for a step."""
    STEP_END = 5
    """The trainer sends no more for this step; the payload lists the blocks for which it had no gradient."""
    PARAM = 6
    """One block's value after a step."""
    UNCHANGED = 7
    """No trainer had a gradient for this block: it was not stepped and keeps its value."""
    COMPLETE = 8
    """The trainer has finished for good; the server answers with the same kind and lists all that have."""
    ERROR = 9
    """An error of the sender, its type and its message; the sender closes the connection after it."""
    CONFIRM = 10
    """A trainer asks for a sign of life; the server answers with the same kind, after all earlier frames."""
    GOODBYE = 11
    """The trainer knows that the server knows that it has finished: the session is no longer needed."""
    LOOK_UP = 12
    """A trainer asks for rows of a table by their ids, in sync mode for those of the header's step."""
    ROWS = 13
    """The requested rows, in the order of their ids; look-ups are answered in turn."""
    ROW_GRADIENT = 14
    """One table's gradient for a step: ids, and a row for each. Empty if no row of this server has one."""
    STEPPED = 15
    """A table has made a step: later look-ups return its rows after that step.

    The payload has ids and changed rows of a table of which the trainer holds a copy; else it is empty.
    """


class Side(enum.Enum):
    """Who sends the frames of a direction."""

    TRAINER = "trainer"
    SERVER = "parameter server"


class State(enum.Enum):
    """How far one direction of a connection has come."""

    START = "start"
    """Nothing sent yet."""
    OPEN = "open"
    """Greeted, and between steps."""
    IN_STEP = "in step"
    """The hyper-parameters of a step were sent; its gradients follow."""
    COMPLETED = "completed"
    """The sender has finished well; a server sends nothing more, a trainer only its goodbye."""
    CLOSED = "closed"
    """The sender said goodbye or reported an error, and sends nothing more."""


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
"""The states in which a direction may continue after the greeting of a later connection."""

NO_TABLES: Final[Mapping[int, int]] = MappingProxyType({})
"""The row sizes of a connection without tables."""
_KINDS: Final = {int(kind): kind for kind in Kind}
_TENSORS: Final = frozenset({Kind.GRAD, Kind.PARAM})
_OF_A_BLOCK: Final = frozenset({Kind.GRAD, Kind.PARAM, Kind.UNCHANGED})
_OF_A_TABLE: Final = frozenset({Kind.LOOK_UP, Kind.ROWS, Kind.ROW_GRADIENT, Kind.STEPPED})
_OF_A_STEP: Final = frozenset({Kind.GRAD, Kind.ROW_GRADIENT, Kind.STEP_END})
_BYTES_PER_NUMBER: Final = 4
_MAX_TRAINERS: Final = 1 << 16


class Header(NamedTuple):
    """One frame's header. ``step`` and ``block`` are zero and ``NO_BLOCK`` for kinds without them.

    ``taken`` may lag behind the truth, as it is set when the frame is enqueued. ``shared`` says that the
    block's bytes are in its region of the memory that both ends share: nothing follows the header.
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
    """The fields that every frame of a connection repeats: the job, the trainer, and its attempt."""

    job: int
    trainer: int
    attempt: int

    def __str__(self) -> str:
        return f"job {self.job:016x}, trainer {self.trainer}, attempt {self.attempt}"


def job_hash(name: str, uid: str) -> int:
    """Return the 64-bit number that identifies a job in every frame."""
    digest = hashlib.blake2b(f"{name}\n{uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def pack_header(header: Header) -> bytes:
    """Encode a header.

    Raises
    ------
    LocalProtocolError
        A field does not fit its width; the message gives the header.
    """
    kind, job, attempt, trainer, step, block, taken, payload_bytes, shared = header
    try:
        return _HEADER.pack(
            MAGIC, VERSION, kind, shared, attempt, trainer, block, job, step, taken, payload_bytes
        )
    except struct.error as error:
        raise LocalProtocolError(f"a field of {header} does not fit the frame header: {error}") from error


def read_header(received: bytes | bytearray | memoryview) -> Header | None:
    """Parse the header at the front of ``received``, or return None while it is incomplete.

    Raises
    ------
    RemoteProtocolError
        The bytes are no frame of this protocol; detected at the first byte that differs.
    """
    front = bytes(received[: len(MAGIC)])
    if not MAGIC.startswith(front):
        raise RemoteProtocolError(
            f"not a fleet frame: it starts with {front!r}, expected {MAGIC!r}; "
            "is the other end a fleet trainer or parameter server?"
        )
    if len(received) < HEADER_BYTES:
        return None
    _, version, kind, shared, attempt, trainer, block, job, step, taken, payload_bytes = _HEADER.unpack_from(
        received
    )
    if version != VERSION:
        raise RemoteProtocolError(
            f"the peer speaks version {version} of the frame protocol, this process version {VERSION}; "
            "run the same version of fleet-trainer in every replica"
        )
    if kind not in _KINDS or shared not in (0, 1):
        raise RemoteProtocolError(
            f"a broken frame header: kind {kind}, shared {shared}; expected a kind of 1 to {max(_KINDS)} "
            "and 0 or 1"
        )
    return Header(_KINDS[kind], job, attempt, trainer, step, block, taken, payload_bytes, shared == 1)


class Conversation:
    """Checks the frames of one direction, one after the other. Used by one thread at a time.

    Parameters
    ----------
    side : Side
        Who sends in this direction.
    identity : Identity
        What every frame must repeat.
    block_bytes : mapping of int to int
        The blocks that this connection carries, with the bytes of each one's tensor.
    remote : bool
        Whether the peer sends in this direction; a broken frame is then a `RemoteProtocolError`.
    row_bytes : mapping of int to int
        The tables that this connection carries, with the bytes of each one's rows.

    Attributes
    ----------
    state : State
    step : int
        The step that began last.
    over : bool
        Whether nothing more may come in this direction.
    shares : bool
        Whether tensors may be in memory that both ends share; set after the greetings.
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
        # The limits of every kind without a tensor; a kind that is missing has no payload.
        self._max_bytes = dict.fromkeys((Kind.HELLO, Kind.HYPER, Kind.ERROR), MAX_TEXT_BYTES)
        self._max_bytes[Kind.STEP_END] = _BYTES_PER_NUMBER * len(block_bytes)
        if side is Side.SERVER:
            self._max_bytes[Kind.COMPLETE] = _BYTES_PER_NUMBER * _MAX_TRAINERS
        self._table_bounds = {
            (kind, table): payload_bounds(
                size, with_ids=kind is not Kind.ROWS, with_rows=kind is not Kind.LOOK_UP
            )
            for kind in _OF_A_TABLE
            for table, size in row_bytes.items()
        }

    def resume(self, state: State, step: int) -> None:
        """Continue where an earlier connection of the session ended; called right after the greeting.

        Raises
        ------
        LocalProtocolError
            No direction continues in this state, or this one has not just been greeted.
        """
        if self.state is not State.OPEN or state not in RESUMED[self._side]:
            raise LocalProtocolError(
                f"a {self._side.value} in the state '{self.state.value}' cannot continue in the state "
                f"'{state.value}'; expected a greeting, and one of "
                f"{', '.join(sorted(each.value for each in RESUMED[self._side]))}"
            )
        self.state, self.step = state, step

    def advance(self, header: Header) -> None:
        """Check the next frame's header, and follow its transition.

        Raises
        ------
        RemoteProtocolError, LocalProtocolError
            The frame may not come now, claims another identity, or has a size that fits no array; by
            ``remote``. The state does not change then.
        """
        kind, step = header.kind, header.step
        following = self._transitions[self.state].get(kind)
        if following is None:
            allowed = ", ".join(each.name for each in self._transitions[self.state]) or "no frame"
            raise self._error(
                f"a {self._side.value} sent {kind.name} in the state '{self.state.value}', expected {allowed}"
            )
        if (header.job, header.trainer, header.attempt) != self._identity:
            found = Identity(header.job, header.trainer, header.attempt)
            raise self._error(
                f"a {kind.name} frame claims to be of {found}; this connection is of {self._identity}"
            )
        self._check_payload(header)
        if kind is Kind.HYPER:
            if step < self.step:
                raise self._error(f"step {step} begins after step {self.step}, expected a later one")
            self.step = step
        elif kind in _OF_A_STEP and step != self.step:
            raise self._error(
                f"a {kind.name} frame is of step {step}, expected the step that began, {self.step}"
            )
        if following is not self.state:
            self.state = following
            self.over = not self._transitions[following]

    def _check_payload(self, header: Header) -> None:
        """Check which block or table a frame is about, and how many bytes it carries."""
        kind, block, found = header.kind, header.block, header.payload_bytes
        if header.shared and not (self.shares and kind in _TENSORS):
            raise self._error(
                f"a {kind.name} frame is in shared memory, expected its payload to follow: "
                + ("it is no tensor" if self.shares else "no memory is shared")
            )
        if kind in _OF_A_BLOCK:
            if block not in self._block_bytes:
                raise self._error(
                    f"a {kind.name} frame names block {block}, "
                    f"expected one of the {len(self._block_bytes)} blocks of this connection"
                )
            size = self._block_bytes[block] if kind in _TENSORS and not header.shared else 0
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
        """Check the size of a frame about a table; the reader of its payload checks the number of ids."""
        if table not in self._row_bytes:
            raise self._error(
                f"a {kind.name} frame names table {table}, "
                f"expected one of the {len(self._row_bytes)} tables of this connection"
            )
        least, most = self._table_bounds[kind, table]
        row_bytes = self._row_bytes[table] if kind is Kind.ROWS else 1
        if found and not (least <= found <= most and found % row_bytes == 0):
            multiple = f"a multiple of {row_bytes}, " if kind is Kind.ROWS else ""
            raise self._error(
                f"a {kind.name} frame of table {table} carries {found} bytes, "
                f"expected {multiple}0 or {least} to {most}"
            )
