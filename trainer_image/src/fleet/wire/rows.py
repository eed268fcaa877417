"""The payloads of frames about tables: ids as 64-bit numbers, and rows of float32, both little endian."""

import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.errors import RemoteProtocolError
from fleet.wire.frames import Kind

__all__ = [
    "MOST_LOOK_UPS",
    "MOST_ROW_BYTES",
    "PART_BYTES",
    "item_bytes",
    "most_rows",
    "pack_ids",
    "pack_row_gradient",
    "pack_rows",
    "read_ids",
    "read_row_gradient",
    "read_rows",
]

MOST_ROW_BYTES: Final = 256 << 20
"""Upper bound of the payload of one frame about a table."""
PART_BYTES: Final = 16 << 20
"""How many bytes of rows a trainer asks for at once, at most."""
MOST_LOOK_UPS: Final = MOST_ROW_BYTES // PART_BYTES
"""How many look-ups a trainer may leave unanswered by one server."""
_ID_BYTES: Final = 8
_SWAPS: Final = sys.byteorder == "big"

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]


def item_bytes(kind: Kind, row_bytes: int) -> int:
    """Return how many bytes a frame of this kind has for each id; 0 where it has no payload."""
    return {
        Kind.LOOK_UP: _ID_BYTES,
        Kind.ROWS: row_bytes,
        Kind.ROW_GRADIENT: _ID_BYTES + row_bytes,
        Kind.STEPPED: _ID_BYTES + row_bytes,
    }.get(kind, 0)


def most_rows(row_bytes: int) -> int:
    """Return how many rows one frame may be about, whichever its kind."""
    return MOST_ROW_BYTES // (_ID_BYTES + row_bytes)


def pack_ids(ids: Ids) -> memoryview:
    """Encode ids; their memory must not change until they have been sent."""
    return _bytes_of(ids)


def read_ids(payload: memoryview) -> Ids:
    """Decode ids, each of which comes once, in ascending order.

    Raises
    ------
    RemoteProtocolError
        One comes twice, or they are in another order.
    """
    ids: Ids = np.frombuffer(payload, dtype="<i8").astype(np.int64, copy=False)
    if ids.size > 1 and not bool((ids[1:] > ids[:-1]).all()):
        at = int(np.flatnonzero(ids[1:] <= ids[:-1])[0])
        raise RemoteProtocolError(
            f"ids of a table: {ids[at + 1]} follows {ids[at]} at position {at + 1}, expected ascending ones, "
            "each once"
        )
    return ids


def pack_rows(rows: Rows) -> memoryview:
    """Encode rows of shape (n, dimension); their memory must not change until they have been sent."""
    return _bytes_of(rows)


def read_rows(payload: memoryview, dimension: int) -> Rows:
    """Decode rows; the caller has checked that the payload is a whole number of them."""
    rows: Rows = np.frombuffer(payload, dtype="<f4").astype(np.float32, copy=False)
    return rows.reshape(-1, dimension)


def pack_row_gradient(ids: Ids, rows: Rows) -> memoryview:
    """Encode ids with a row for each: first all ids, then all rows."""
    packed = bytearray(ids.nbytes + rows.nbytes)
    whole = memoryview(packed)
    whole[: ids.nbytes] = _bytes_of(ids)
    whole[ids.nbytes :] = _bytes_of(rows)
    return whole


def read_row_gradient(payload: memoryview, dimension: int) -> tuple[Ids, Rows]:
    """Decode what `pack_row_gradient` has encoded; raises as `read_ids`.

    The caller has checked that the payload has whole ids and rows.
    """
    ids_bytes = len(payload) // (_ID_BYTES + 4 * dimension) * _ID_BYTES
    return read_ids(payload[:ids_bytes]), read_rows(payload[ids_bytes:], dimension)


def _bytes_of(array: Ids | Rows) -> memoryview:
    contiguous = np.ascontiguousarray(array)
    return (contiguous.byteswap() if _SWAPS else contiguous).reshape(-1).view(np.uint8).data
