"""Whatever bytes come: they are read, or refused by the error that names the protocol, and by no other."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import RemoteProtocolError
from fleet.wire import HEADER_BYTES
from tests.support.any_bytes import readers

READERS = {name: readers()[name] for name in ("hello", "hyper", "numbers", "error", "header")}
DEEP = [b"[" * depth + b"]" * depth for depth in (200, 480, 900, 3000, 100_000)]
FIXED = settings(derandomize=True, max_examples=300, deadline=None)


def read_or_refuse(name: str, payload: bytes) -> None:
    """Read a payload as a peer's; anything but a value and the protocol's own error fails the test."""
    with contextlib.suppress(RemoteProtocolError):
        READERS[name][0](payload)


@pytest.mark.parametrize("name", READERS)
@FIXED
@given(payload=st.binary(max_size=200))
def test_bytes_of_nobody(name, payload):
    read_or_refuse(name, payload)


@pytest.mark.parametrize("name", READERS)
@FIXED
@given(data=st.data())
def test_bytes_that_were_a_message_once(name, data):
    good = bytearray(READERS[name][1])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(good) - 1)))
        good[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    read_or_refuse(name, bytes(good))


@pytest.mark.parametrize("name", [name for name in READERS if name != "header"])
@pytest.mark.parametrize("payload", DEEP, ids=lambda each: f"depth-{len(each) // 2}")
def test_what_is_nested_too_deep(name, payload):
    read_or_refuse(name, payload)
    read_or_refuse(name, b'[{"a":' + payload + b"}]")


@FIXED
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_a_header_of_any_bytes_after_its_mark(rest):
    read_or_refuse("header", b"FLET" + rest[4:])
