"""The payloads of frames about tables: ids and float32 rows, all in little-endian byte order.

Ids are distinct and ascending. They are encoded as the first id and the gaps between consecutive ids. All
gaps in a frame have the width that the largest gap needs, so that vectorized code can encode and decode them.

=======  ================  ================================================================
offset   bytes             what
=======  ================  ================================================================
0        8                 the first id
8        1                 the number of bytes of a gap: 1, 2, 4 or 8
9        7                 zeros
16       rows              the rows, if the frame has any: one for each id
         the rest          the gaps, one fewer than ids
=======  ================  ================================================================

A frame without ids has no payload.
"""

import struct
import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.errors import RemoteProtocolError

__all__ = [
    "MOST_LOOK_UPS",
    "MOST_ROW_BYTES",
    "PART_BYTES",
    "most_rows",
    "pack_ids",
    "pack_row_gradient",
    "pack_rows",
    "payload_bounds",
    "read_ids",
    "read_row_gradient",
    "read_rows",
]

MOST_ROW_BYTES: Final = 256 << 20
"""The largest payload of one frame about a table, in bytes."""
PART_BYTES: Final = 16 << 20
"""The largest size of the rows that one look-up requests, in bytes."""
MOST_LOOK_UPS: Final = MOST_ROW_BYTES // PART_BYTES
"""The largest number of look-ups that a trainer may have in flight at one server."""
_ID_BYTES: Final = 8
"""The size in bytes of an id, and of the widest gap."""
_FIRST: Final = struct.Struct("<qB7x")
_WIDTHS: Final = (1, 2, 4, 8)
_GAPS: Final = {width: np.dtype(f"<u{width}") for width in _WIDTHS}
"""The dtype of the gaps between ids, by width in bytes."""
_SWAPS: Final = sys.byteorder == "big"

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]


def payload_bounds(row_bytes: int, *, with_ids: bool, with_rows: bool) -> tuple[int, int]:
    """Return the minimum and the maximum size of a non-empty payload in bytes."""
    most, size = most_rows(row_bytes), row_bytes if with_rows else 0
    if not with_ids:
        return size, most * size
    return _FIRST.size + size, _FIRST.size + most * size + (most - 1) * _ID_BYTES


def most_rows(row_bytes: int) -> int:
    """Return the maximum number of rows that any kind of frame may carry or request."""
    return (MOST_ROW_BYTES - _FIRST.size) // (_ID_BYTES + row_bytes)


def pack_ids(ids: Ids, rows: memoryview | bytes = b"") -> memoryview:
    """Encode ascending ids, with the bytes of their rows if the frame has any."""
    if not ids.size:
        return memoryview(b"")
    known = ids.view(np.uint64)
    gaps = known[1:] - known[:-1]  # modulo 2**64, because a gap may overflow int64
    largest = int(gaps.max()) if gaps.size else 0
    width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4 if largest < 1 << 32 else 8
    first = _FIRST.pack(int(ids[0]), width)
    return memoryview(b"".join((first, rows, gaps.astype(_GAPS[width]).view(np.uint8).data)))


def read_ids(payload: memoryview, row_bytes: int, *, with_rows: bool = False) -> Ids:
    """Decode the ids in a frame about a table with ``row_bytes`` bytes per row.

    Parameters
    ----------
    payload : memoryview
    row_bytes : int
    with_rows : bool
        Whether the payload has a row for each id, too.

    Returns
    -------
    int64[n]

    Raises
    ------
    RemoteProtocolError
        The ids are not distinct and ascending, there are too many for one frame, or the payload is truncated.
    """
    if not len(payload):
        return np.zeros(0, dtype=np.int64)
    most, size = most_rows(row_bytes), row_bytes if with_rows else 0
    # A payload with n ids has 16 + n * size + (n - 1) * width bytes.
    first, width = _FIRST.unpack_from(payload) if len(payload) >= _FIRST.size else (0, 0)
    number, left = divmod(len(payload) - _FIRST.size + width, size + width) if width in _WIDTHS else (0, 1)
    if left or not 1 <= number <= most:
        raise RemoteProtocolError(
            f"a payload with ids of a table has {len(payload)} bytes, {width} for each gap and {size} "
            f"for each row; expected 1 to {most} ids, and {', '.join(map(str, _WIDTHS))} bytes for each gap"
        )
    gaps = np.frombuffer(payload, _GAPS[width], offset=_FIRST.size + number * size)
    ids: Ids = np.empty(number, np.int64)
    ids[0] = first
    ids[1:] = gaps  # modulo 2**64
    ids.cumsum(out=ids)
    # Narrow gaps cannot overflow more than once: frames are too short.
    if not gaps.all() or ids[-1] < first or width == _ID_BYTES:
        _check_ascending(ids)
    return ids


def pack_rows(rows: Rows) -> memoryview:
    """Encode rows of shape (n, dimension), without a copy if possible; rows must not change until sent."""
    contiguous = np.ascontiguousarray(rows)
    return (contiguous.byteswap() if _SWAPS else contiguous).reshape(-1).view(np.uint8).data


def read_rows(payload: memoryview, dimension: int) -> Rows:
    """Decode rows; the caller must have checked that the payload size is a multiple of the row size."""
    rows: Rows = np.frombuffer(payload, dtype="<f4").astype(np.float32, copy=False)
    return rows.reshape(-1, dimension)


def pack_row_gradient(ids: Ids, rows: Rows) -> memoryview:
    """Encode sorted ids and one row for each id."""
    return pack_ids(ids, pack_rows(rows))


def read_row_gradient(payload: memoryview, dimension: int) -> tuple[Ids, Rows]:
    """Decode the ids and rows of a row gradient; raises the same errors as `read_ids`."""
    row_bytes = 4 * dimension
    ids = read_ids(payload, row_bytes, with_rows=True)
    return ids, read_rows(payload[_FIRST.size : _FIRST.size + ids.size * row_bytes], dimension)


def _check_ascending(ids: Ids) -> None:
    if not bool((ids[1:] > ids[:-1]).all()):
        at = int(np.flatnonzero(ids[1:] <= ids[:-1])[0])
        raise RemoteProtocolError(
            f"ids of a table: {ids[at + 1]} follows {ids[at]} at position {at + 1}, expected distinct ids in "
            "ascending order"
        )
