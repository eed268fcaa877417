"""What a trainer shares with a server: a gradient stays as it is until the server needs it no more."""

import pytest

from fleet.errors import LocalProtocolError
from fleet.parameter_server.transport.exchange import Exchange
from fleet.parameter_server.transport.shared_memory import SharedBlocks

BLOCKS = {0: 4, 1: 4}


@pytest.fixture
def exchange() -> Exchange:
    return Exchange(BLOCKS)


@pytest.fixture
def server(exchange) -> SharedBlocks:
    """Give the gradients as the server sees them."""
    return SharedBlocks.receive(exchange.descriptor, BLOCKS, writable=True)


def put(exchange: Exchange, block: int, gradient: bytes, frame: int) -> bool:
    done = exchange.put(block, memoryview(gradient))
    exchange.sent(block, frame)
    return done


def test_a_gradient_may_be_overwritten_once_it_is_answered(exchange, server):
    assert put(exchange, 0, b"aaaa", frame=3)
    assert put(exchange, 1, b"bbbb", frame=4)
    assert not put(exchange, 0, b"cccc", frame=5)
    assert (bytes(server[0]), bytes(server[1])) == (b"aaaa", b"bbbb")
    exchange.answered(0, taken=5)
    assert put(exchange, 0, b"dddd", frame=6)
    assert not put(exchange, 1, b"eeee", frame=7)
    assert (bytes(server[0]), bytes(server[1])) == (b"dddd", b"bbbb")


def test_an_answer_to_what_came_before_a_gradient_does_not_free_it(exchange, server):
    put(exchange, 0, b"aaaa", frame=3)
    exchange.answered(0, taken=2)
    assert not put(exchange, 0, b"bbbb", frame=4)
    assert bytes(server[0]) == b"aaaa"


def test_a_gradient_that_travelled_because_of_another_must_be_answered_as_well(exchange, server):
    put(exchange, 0, b"aaaa", frame=3)
    put(exchange, 0, b"bbbb", frame=4)
    exchange.answered(0, taken=3)
    assert not put(exchange, 0, b"cccc", frame=5)
    exchange.answered(0, taken=5)
    assert put(exchange, 0, b"dddd", frame=6)


def test_values_that_are_mapped_need_no_descriptor_again(exchange):
    values = SharedBlocks.create(BLOCKS)
    with pytest.raises(OSError, match="did not come"):
        exchange.map_values([])
    exchange.map_values([values.descriptor])
    exchange.map_values([])  # a system may keep a descriptor back from a later greeting
    values[0][:] = b"abcd"
    assert bytes(exchange.value(0)) == b"abcd"


def test_a_gradient_of_another_size_is_left_to_its_frame_to_be_refused(exchange, server):
    assert not exchange.put(0, memoryview(b"a"))
    assert bytes(server[0]) == bytes(4)


def test_an_answer_that_is_faster_than_the_note_of_what_it_answers_counts(exchange):
    exchange.put(0, memoryview(b"aaaa"))
    exchange.answered(0, taken=3)
    exchange.sent(0, 3)
    assert put(exchange, 0, b"bbbb", frame=4)


def test_values_lie_in_the_servers_memory(exchange):
    with pytest.raises(LocalProtocolError, match="no values are shared"):
        exchange.value(1)
    values = SharedBlocks.create(BLOCKS)
    with pytest.raises(OSError, match="did not come"):
        exchange.map_values([])
    exchange.map_values([values.descriptor])
    values[1][:] = b"wwww"
    assert bytes(exchange.value(1)) == b"wwww"
