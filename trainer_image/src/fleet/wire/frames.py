"""Frame headers: 52 bytes, little endian, the same in both directions.

=======  =====  ==========================================================================
offset   bytes  field
=======  =====  ==========================================================================
0        4      magic ``FLET``
4        1      version of the protocol
5        1      kind of the frame
6        2      1 where the payload lies in memory that both ends share, and does not follow; else 0
8        4      attempt: the start count of the trainer's process
12       4      trainer id
16       4      block number, that of a table, or ``NO_BLOCK`` where the frame is about none
20       8      job hash, so that a frame of another job is recognised
28       8      step
36       8      how many frames of the session the sender has taken from the other end
44       8      payload bytes that follow the header
=======  =====  ==========================================================================
"""

import enum
import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from fleet.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["HEADER_BYTES", "NO_BLOCK", "VERSION", "Header", "Kind", "job_hash", "pack_header", "read_header"]

MAGIC: Final = b"FLET"
VERSION: Final = 4
NO_BLOCK: Final = 0xFFFFFFFF
_HEADER: Final = struct.Struct("<4sBBHIIIQQQQ")
HEADER_BYTES: Final = _HEADER.size


class Kind(enum.IntEnum):
    """What a frame says."""

    HELLO = 1
    """First frame of both sides: who speaks, and to which life of the server."""
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
    """The trainer has finished for good; the server answers with the same kind, and names all that have."""
    ERROR = 9
    """An error of the sender, its type and its sentence; the sender closes the connection after it."""
    CONFIRM = 10
    """A trainer asks for a word; the server answers with the same kind, and has all that came before it."""
    GOODBYE = 11
    """The trainer knows that the server knows that it has finished: nobody needs the session any more."""
    LOOK_UP = 12
    """A trainer asks for rows of a table, in sync mode those of the header's step, by their ids."""
    ROWS = 13
    """The rows that a trainer has asked for, in the order of their ids; look-ups are answered in turn."""
    ROW_GRADIENT = 14
    """One table's gradient for a step: ids, and a row for each. Empty where no row of this server has one."""
    STEPPED = 15
    """A table has made a step: rows that are looked up from now on are those after it.

    The payload has ids and rows that have changed, of a table that the trainer holds too; else it is empty.
    """


_KINDS: Final = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Header:
    """One frame's header. ``step`` and ``block`` are zero and ``NO_BLOCK`` where they have no meaning.

    ``taken`` may lag behind the truth, as it is written down when the frame is enqueued. ``shared`` says that
    the block's bytes lie in memory that both ends share, in the block's region: nothing follows the header.
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


def job_hash(name: str, uid: str) -> int:
    """Return the 64-bit number that stands for a job in every frame."""
    digest = hashlib.blake2b(f"{name}\n{uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def pack_header(header: Header) -> bytes:
    """Encode a header.

    Raises
    ------
    LocalProtocolError
        A field does not fit its width; the message gives the header.
    """
    try:
        return _HEADER.pack(
            MAGIC,
            VERSION,
            header.kind,
            header.shared,
            header.attempt,
            header.trainer,
            header.block,
            header.job,
            header.step,
            header.taken,
            header.payload_bytes,
        )
    except struct.error as error:
        raise LocalProtocolError(f"a field of {header} does not fit the frame header: {error}") from error


def read_header(received: bytes | bytearray | memoryview) -> Header | None:
    """Parse the header at the front of ``received``, or return None while it is incomplete.

    Raises
    ------
    RemoteProtocolError
        The bytes are no frame of this protocol; recognised from the first byte that differs.
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
