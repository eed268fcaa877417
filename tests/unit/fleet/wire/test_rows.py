"""The payloads of frames about tables."""

import numpy as np
import pytest

from fleet.errors import RemoteProtocolError
from fleet.wire import Kind
from fleet.wire.rows import (
    MOST_ROW_BYTES,
    item_bytes,
    most_rows,
    pack_ids,
    pack_row_gradient,
    pack_rows,
    read_ids,
    read_row_gradient,
    read_rows,
)

IDS = np.array([-(2**63), -1, 0, 7, 2**63 - 1])
ROWS = np.arange(15, dtype=np.float32).reshape(5, 3)


def test_what_is_packed_is_read():
    assert read_ids(memoryview(bytearray(pack_ids(IDS)))).tolist() == IDS.tolist()
    assert np.array_equal(read_rows(memoryview(bytearray(pack_rows(ROWS))), 3), ROWS)
    ids, rows = read_row_gradient(pack_row_gradient(IDS, ROWS), 3)
    assert ids.tolist() == IDS.tolist()
    assert np.array_equal(rows, ROWS)


def test_rows_that_do_not_lie_together_are_packed_alike():
    assert bytes(pack_rows(ROWS[::2])) == bytes(pack_rows(ROWS[::2].copy()))


def test_nothing_is_read_from_nothing():
    ids, rows = read_row_gradient(memoryview(b""), 3)
    assert (ids.size, rows.shape) == (0, (0, 3))


@pytest.mark.parametrize(("ids", "found"), [([1, 1], "1 follows 1"), ([5, 2], "2 follows 5")])
def test_ids_that_come_twice_or_in_another_order_are_refused(ids, found):
    with pytest.raises(RemoteProtocolError, match=f"{found} at position 1, expected ascending ones"):
        read_ids(pack_ids(np.array(ids)))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Kind.LOOK_UP, 8), (Kind.ROWS, 12), (Kind.ROW_GRADIENT, 20), (Kind.STEPPED, 20)],
    ids=["look-up", "rows", "gradient", "stepped"],
)
def test_each_kind_has_so_many_bytes_for_an_id(kind, expected):
    assert item_bytes(kind, 12) == expected


def test_as_many_rows_as_one_frame_may_be_about_fit_into_every_kind():
    assert all(most_rows(12) * item_bytes(kind, 12) <= MOST_ROW_BYTES for kind in Kind)
