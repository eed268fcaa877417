"""Headers: every field survives, a cut one is incomplete, and anything else is refused with a reason."""

import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import LocalProtocolError, RemoteProtocolError
from fleet.wire import HEADER_BYTES, NO_BLOCK, Header, Kind, job_hash, pack_header, read_header
from fleet.wire.frames import VERSION

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
HEADERS = st.builds(Header, st.sampled_from(Kind), U64, U32, U32, U64, U32, U64, U64, st.booleans())
SOME = Header(Kind.GRAD, job=2**63, attempt=3, trainer=1, step=10**12, block=7, taken=5, payload_bytes=2**40)


@given(HEADERS)
def test_a_header_survives_the_wire(header):
    wire = pack_header(header)
    assert len(wire) == HEADER_BYTES
    assert read_header(wire) == header


@given(HEADERS)
def test_a_header_cut_anywhere_is_incomplete(header):
    wire = pack_header(header)
    assert all(read_header(wire[:n]) is None for n in range(len(wire)))


@given(HEADERS, st.binary(max_size=80))
def test_what_follows_a_header_does_not_change_it(header, rest):
    assert read_header(memoryview(pack_header(header) + rest)) == header


@given(st.binary(min_size=1).filter(lambda received: not b"FLET".startswith(received[:4])))
def test_garbage_is_refused_from_its_first_wrong_byte(received):
    with pytest.raises(RemoteProtocolError, match="not a fleet frame"):
        read_header(received)


def test_a_visitor_from_the_web_is_shown_as_it_came():
    with pytest.raises(RemoteProtocolError, match=r"b'GET '.*expected b'FLET'"):
        read_header(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        pytest.param(4, VERSION - 1, f"version {VERSION - 1} .* version {VERSION}", id="an-older-version"),
        pytest.param(4, VERSION + 1, f"version {VERSION + 1} .* version {VERSION}", id="a-newer-version"),
        pytest.param(5, 0, "kind 0", id="no-kind"),
        pytest.param(5, 200, "kind 200", id="an-unknown-kind"),
        pytest.param(6, 2, "shared 2", id="neither-shared-nor-not"),
    ],
)
def test_a_broken_header_is_refused_by_what_is_broken(offset, value, words):
    wire = bytearray(pack_header(SOME))
    wire[offset] = value
    with pytest.raises(RemoteProtocolError, match=words):
        read_header(wire)


@pytest.mark.parametrize("field", ["job", "attempt", "trainer", "step", "block", "payload_bytes"])
@pytest.mark.parametrize("value", [-1, 2**64])
def test_a_field_that_does_not_fit_is_our_own_mistake(field, value):
    with pytest.raises(LocalProtocolError, match=str(value)):
        pack_header(dataclasses.replace(SOME, **{field: value}))


def test_the_layout_is_the_documented_one():
    expected = struct.pack("<4sBBHIIIQQQQ", b"FLET", 4, 4, 0, 3, 1, 7, 2**63, 10**12, 5, 2**40)
    assert pack_header(SOME) == expected


def test_a_frame_about_no_block_says_so():
    assert Header(Kind.PULL, 0, 0, 0).block == NO_BLOCK


def test_jobs_differ_by_name_and_by_uid():
    hashes = {
        job_hash("a", "b"),
        job_hash("a", "c"),
        job_hash("ab", ""),
        job_hash("", "ab"),
        job_hash("a", ""),
    }
    assert len(hashes) == 5
