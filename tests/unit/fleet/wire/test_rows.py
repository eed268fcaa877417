"""The payloads of frames about tables."""

import numpy as np
import pytest

from fleet.errors import RemoteProtocolError
from fleet.wire.rows import (
    MOST_ROW_BYTES,
    most_rows,
    pack_ids,
    pack_row_gradient,
    pack_rows,
    payload_bounds,
    read_ids,
    read_row_gradient,
    read_rows,
)

IDS = np.array([-(2**63), -1, 0, 7, 2**63 - 1])
ROWS = np.arange(15, dtype=np.float32).reshape(5, 3)


@pytest.mark.parametrize(
    "ids",
    [IDS, IDS[1:4], np.array([5]), np.array([0, 255]), np.array([-3, 253, 254]), np.array([0, 65_536])],
    ids=["any", "few", "one", "narrow", "two-bytes", "four-bytes"],
)
def test_what_is_packed_is_read(ids):
    rows = ROWS[: ids.size]
    assert read_ids(memoryview(bytearray(pack_ids(ids))), 12).tolist() == ids.tolist()
    assert np.array_equal(read_rows(memoryview(bytearray(pack_rows(rows))), 3), rows)
    found, of_found = read_row_gradient(pack_row_gradient(ids, rows), 3)
    assert found.tolist() == ids.tolist()
    assert np.array_equal(of_found, rows)


@pytest.mark.parametrize(("gap", "width"), [(255, 1), (256, 2), (65_535, 2), (65_536, 4), (2**32, 8)])
def test_gaps_are_as_wide_as_the_largest_needs(gap, width):
    ids = np.array([-7, -6, -5, -5 + gap])
    assert len(pack_ids(ids)) == 16 + 3 * width
    assert len(pack_row_gradient(ids, ROWS[:4])) == 16 + 4 * 12 + 3 * width


def test_rows_that_do_not_lie_together_are_packed_alike():
    assert bytes(pack_rows(ROWS[::2])) == bytes(pack_rows(ROWS[::2].copy()))


def test_nothing_is_read_from_nothing():
    ids, rows = read_row_gradient(memoryview(b""), 3)
    assert (ids.size, rows.shape) == (0, (0, 3))


@pytest.mark.parametrize(("ids", "found"), [([1, 1], "1 follows 1"), ([5, 2], "2 follows 5")])
def test_ids_that_come_twice_or_in_another_order_are_refused(ids, found):
    with pytest.raises(RemoteProtocolError, match=f"{found} at position 1, expected distinct ids"):
        read_ids(pack_ids(np.array(ids)), 12)


PACKED = bytes(pack_ids(np.array([1, 2, 300])))


@pytest.mark.parametrize(
    "payload",
    [PACKED[:-1], PACKED + b"x", PACKED[:8] + b"\x03" + PACKED[9:], PACKED[:8] + bytes(8), PACKED[:15], b"x"],
    ids=["half-a-gap", "more", "width-3", "width-0", "half-a-beginning", "one-byte"],
)
def test_a_payload_that_is_no_ids_is_refused(payload):
    with pytest.raises(RemoteProtocolError, match=f"a payload with ids of a table has {len(payload)} bytes"):
        read_ids(memoryview(payload), 12)


def test_narrow_gaps_ask_for_no_more_rows_than_an_answer_carries():
    row_bytes = MOST_ROW_BYTES // 4
    assert most_rows(row_bytes) == 3
    assert read_ids(pack_ids(np.arange(3)), row_bytes).size == 3
    with pytest.raises(RemoteProtocolError, match="expected 1 to 3 ids"):
        read_ids(pack_ids(np.arange(4)), row_bytes)


def test_as_many_rows_as_one_frame_may_be_about_fit_into_every_kind():
    for with_ids, with_rows in ((True, True), (True, False), (False, True)):
        assert payload_bounds(12, with_ids=with_ids, with_rows=with_rows)[1] <= MOST_ROW_BYTES
    for number in (1, 5):
        least, most = payload_bounds(12, with_ids=True, with_rows=True)
        assert least <= len(pack_row_gradient(IDS[:number], ROWS[:number])) <= most
        least, most = payload_bounds(12, with_ids=True, with_rows=False)
        assert least <= len(pack_ids(IDS[:number])) <= most
