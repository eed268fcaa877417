"""One direction of a connection: whether the next frame may come, and whether it is what it claims to be."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fleet.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from fleet.wire.frames import NO_BLOCK, Header, Kind
from fleet.wire.messages import MAX_TEXT_BYTES
from fleet.wire.rows import bounds
from fleet.wire.states import RESUMED, TRANSITIONS, Position, Side, State

__all__ = ["NO_TABLES", "Conversation", "Identity"]

_TENSORS = frozenset({Kind.GRAD, Kind.PARAM})
_TEXTS = frozenset({Kind.HELLO, Kind.HYPER, Kind.ERROR})
_OF_A_BLOCK = frozenset({Kind.GRAD, Kind.PARAM, Kind.UNCHANGED})
_OF_A_TABLE = frozenset({Kind.LOOK_UP, Kind.ROWS, Kind.ROW_GRADIENT, Kind.STEPPED})
NO_TABLES: Final[Mapping[int, int]] = MappingProxyType({})
"""In place of the tables of a connection that carries none."""
_BYTES_PER_NUMBER = 4
_MOST_TRAINERS = 1 << 16


@dataclass(frozen=True, slots=True)
class Identity:
    """What every frame of one connection repeats: the job, and which start of which trainer speaks."""

    job: int
    trainer: int
    attempt: int


class Conversation:
    """The frames of one direction, checked one after the other. Used by one thread at a time.

    Parameters
    ----------
    side : Side
        Who sends in this direction.
    identity : Identity
        What every frame must repeat.
    block_bytes : mapping of int to int
        The blocks that this connection carries, with the bytes of each one's tensor.
    remote : bool
        Whether the peer sends in this direction; decides whose mistake a broken frame is.
    row_bytes : mapping of int to int
        The tables that this connection carries, with the bytes of each one's rows.
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
        self._side = side
        self._identity = identity
        self._block_bytes = block_bytes
        self._row_bytes = row_bytes
        self._error: type[ProtocolError] = RemoteProtocolError if remote else LocalProtocolError
        self._state = State.START
        self._step = 0
        self.shares = False
        """Whether tensors may lie in memory that both ends share; the greetings settle it."""

    @property
    def state(self) -> State:
        """How far this direction has come."""
        return self._state

    @property
    def over(self) -> bool:
        """Whether nothing more comes in this direction."""
        return not TRANSITIONS[self._side][self._state]

    def resume(self, position: Position) -> None:
        """Go on where an earlier connection of the session has come to; right after the greeting.

        Raises
        ------
        LocalProtocolError
            No greeting leads there.
        """
        if self._state is not State.OPEN or position.state not in RESUMED[self._side]:
            raise LocalProtocolError(
                f"a {self._side.value} in the state '{self._state.value}' cannot go on in the state "
                f"'{position.state.value}'; expected a greeting, and one of "
                f"{', '.join(sorted(state.value for state in RESUMED[self._side]))}"
            )
        self._state, self._step = position.state, position.step

    def advance(self, header: Header) -> None:
        """Take the next frame's header.

        Raises
        ------
        RemoteProtocolError, LocalProtocolError
            The frame may not come now, claims another identity, or has a size that fits no array; by
            ``remote``. The state does not change then.
        """
        following = TRANSITIONS[self._side][self._state].get(header.kind)
        if following is None:
            allowed = ", ".join(kind.name for kind in TRANSITIONS[self._side][self._state]) or "no frame"
            raise self._error(
                f"a {self._side.value} sent {header.kind.name} in the state '{self._state.value}', "
                f"expected {allowed}"
            )
        self._check_identity(header)
        self._check_size(header)
        self._check_step(header)
        self._state = following

    def _check_identity(self, header: Header) -> None:
        found = Identity(header.job, header.trainer, header.attempt)
        if found != self._identity:
            raise self._error(
                f"a {header.kind.name} frame claims to be of {_words(found)}; "
                f"this connection is of {_words(self._identity)}"
            )

    def _check_block(self, header: Header) -> None:
        if header.kind in _OF_A_BLOCK and header.block not in self._block_bytes:
            raise self._error(
                f"a {header.kind.name} frame names block {header.block}, "
                f"expected one of the {len(self._block_bytes)} blocks of this connection"
            )
        if header.kind in _OF_A_TABLE and header.block not in self._row_bytes:
            raise self._error(
                f"a {header.kind.name} frame names table {header.block}, "
                f"expected one of the {len(self._row_bytes)} tables of this connection"
            )
        if header.kind not in _OF_A_BLOCK | _OF_A_TABLE and header.block != NO_BLOCK:
            raise self._error(f"a {header.kind.name} frame names block {header.block}, expected none")

    def _check_size(self, header: Header) -> None:
        self._check_block(header)
        if header.shared and not (self.shares and header.kind in _TENSORS):
            raise self._error(
                f"a {header.kind.name} frame lies in shared memory, expected its payload to follow: "
                + ("it is no tensor" if self.shares else "no memory is shared")
            )
        if header.kind in _OF_A_TABLE:
            self._check_rows(header)
            return
        if header.kind in _TENSORS:
            low = high = 0 if header.shared else self._block_bytes[header.block]
        elif header.kind in _TEXTS:
            low, high = 0, MAX_TEXT_BYTES
        elif header.kind is Kind.STEP_END:
            low, high = 0, _BYTES_PER_NUMBER * len(self._block_bytes)
        elif header.kind is Kind.COMPLETE and self._side is Side.SERVER:
            low, high = 0, _BYTES_PER_NUMBER * _MOST_TRAINERS
        else:
            low = high = 0
        if not low <= header.payload_bytes <= high:
            block = "" if header.block == NO_BLOCK else f" of block {header.block}"
            expected = f"{low}" if low == high else f"at most {high}"
            raise self._error(
                f"a {header.kind.name} frame{block} carries {header.payload_bytes} bytes, expected {expected}"
            )

    def _check_rows(self, header: Header) -> None:
        """Check that a frame of a table carries no more than one may; who reads it looks at how many ids."""
        row_bytes, found = self._row_bytes[header.block], header.payload_bytes
        low, high = bounds(header.kind, row_bytes)
        whole = header.kind is not Kind.ROWS or found % row_bytes == 0
        if found and not (low <= found <= high and whole):
            multiple = f"a multiple of {row_bytes}, " if header.kind is Kind.ROWS else ""
            named = f"{header.kind.name} frame of table {header.block}"
            raise self._error(f"a {named} carries {found} bytes, expected {multiple}0 or {low} to {high}")

    def _check_step(self, header: Header) -> None:
        if header.kind is Kind.HYPER:
            if header.step < self._step:
                raise self._error(f"step {header.step} begins after step {self._step}, expected a later one")
            self._step = header.step
        elif header.kind in (Kind.GRAD, Kind.ROW_GRADIENT, Kind.STEP_END) and header.step != self._step:
            raise self._error(
                f"a {header.kind.name} frame is of step {header.step}, "
                f"expected the step that began, {self._step}"
            )


def _words(identity: Identity) -> str:
    return f"job {identity.job:016x}, trainer {identity.trainer}, attempt {identity.attempt}"
