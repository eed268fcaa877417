"""Small payloads: what goes in comes out, exactly; anything else is refused with a reason."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineExceededError,
    FleetError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
    StateLostError,
)
from fleet.wire import Hello
from fleet.wire.messages import (
    MAX_TEXT_BYTES,
    pack_error,
    pack_hello,
    pack_hyper,
    pack_numbers,
    read_error,
    read_hello,
    read_hyper,
    read_numbers,
)

NUMBERS = st.one_of(st.floats(allow_nan=False), st.integers(), st.booleans(), st.none(), st.text())
GROUPS = st.lists(st.dictionaries(st.text(), st.one_of(NUMBERS, st.tuples(NUMBERS, NUMBERS))), max_size=3)


@given(GROUPS)
def test_hyper_parameters_arrive_to_the_bit(groups):
    assert read_hyper(pack_hyper(groups)) == tuple(groups)


@pytest.mark.parametrize("value", [0.1, 5e-324, 1.7976931348623157e308, -0.0, math.inf, 1 / 3])
def test_a_learning_rate_is_the_same_float(value):
    ((group),) = read_hyper(pack_hyper([{"lr": value}]))
    assert math.copysign(1, group["lr"]) == math.copysign(1, value)
    assert group["lr"].hex() == value.hex()


def test_a_value_that_cannot_travel_is_our_own_mistake():
    with pytest.raises(LocalProtocolError, match="object is not JSON serializable"):
        pack_hyper([{"lr": object()}])


@pytest.mark.parametrize("payload", [b"", b"{", b"{}", b"[1]", b"\xff", b"[" * 100_000, b'["a"]'])
def test_what_are_no_hyper_parameters_is_refused(payload):
    with pytest.raises(RemoteProtocolError, match="HYPER"):
        read_hyper(payload)


def test_a_greeting_survives():
    assert read_hello(pack_hello(Hello("0a1b", 12))) == Hello("0a1b", 12)


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b'{"incarnation": 1, "num_blocks": 2}', b'{"incarnation": "a"}', b"x"]
)
def test_what_is_no_greeting_is_refused(payload):
    with pytest.raises(RemoteProtocolError, match="HELLO"):
        read_hello(payload)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_block_numbers_survive(blocks):
    payload = pack_numbers(blocks)
    assert read_numbers(payload) == tuple(blocks)
    for cut in range(len(payload)):
        if cut % 4:
            with pytest.raises(RemoteProtocolError, match=f"{cut} bytes, expected a multiple of 4"):
                read_numbers(payload[:cut])


@pytest.mark.parametrize(
    "kind",
    [
        FleetError,
        ConfigurationError,
        CheckpointError,
        PeerLostError,
        DeadlineExceededError,
        StateLostError,
    ],
)
def test_an_error_keeps_its_type_and_its_sentence(kind):
    error = read_error(pack_error(kind("trainer 1 vanished\nfor good")))
    assert type(error) is kind
    assert str(error) == "trainer 1 vanished\nfor good"


def test_any_other_error_is_the_peers():
    assert type(read_error(b"KeyboardInterrupt\nstop")) is RemoteProtocolError
    assert str(read_error(b"no line break")) == "no line break"
    assert "\\xff" in str(read_error(b"FleetError\n\xff"))


def test_an_error_has_a_bound():
    assert len(pack_error(FleetError("x" * 2 * MAX_TEXT_BYTES))) == MAX_TEXT_BYTES
