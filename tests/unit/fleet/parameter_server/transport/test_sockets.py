"""Sockets move whole buffers, however small the kernel's are; Unix sockets connect one user only."""

import os
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from fleet.parameter_server.transport import sockets
from fleet.parameter_server.transport.sockets import ConnectionEndedError
from tests.support.processes import wait_for

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Give two ends of a TCP connection with 64 kB buffers."""
    with sockets.listen("127.0.0.1") as listening:
        port = listening.getsockname()[1]
        dialled = sockets.dial("127.0.0.1", port, timeout_seconds=5.0, buffer_bytes=65536)
        accepted, _ = listening.accept()
        sockets.tune(accepted, 65536)
    dialled.settimeout(10)
    accepted.settimeout(None)
    yield dialled, accepted
    dialled.close()
    accepted.close()


def test_many_buffers_of_all_sizes_arrive_in_order(pair):
    here, there = pair
    buffers = [bytes([index % 251]) * size for index, size in enumerate([0, 1, 70_000, 3] * 400)]
    sender = threading.Thread(target=sockets.send_all, args=(here, buffers), daemon=True)
    sender.start()
    received = bytearray(sum(map(len, buffers)))
    sockets.receive_exactly(there, memoryview(received))
    sender.join(60)
    assert received == b"".join(buffers)


def test_an_end_says_how_far_it_came(pair):
    here, there = pair
    here.sendall(b"abc")
    here.close()
    with pytest.raises(ConnectionEndedError, match="closed at the other end, after 3 of 10 bytes"):
        sockets.receive_exactly(there, memoryview(bytearray(10)))
    with pytest.raises(ConnectionEndedError, match=r"closed at the other end$"):
        sockets.receive_exactly(there, memoryview(bytearray(10)))


def test_hanging_up_wakes_a_thread_that_receives(pair):
    _, there = pair
    ended: list[OSError] = []

    def receive() -> None:
        try:
            sockets.receive_exactly(there, memoryview(bytearray(10)))
        except OSError as error:
            ended.append(error)

    waiting = threading.Thread(target=receive, daemon=True)
    waiting.start()
    sockets.hang_up(there)
    waiting.join(60)
    assert len(ended) == 1
    sockets.hang_up(there)


def test_draining_lets_the_peer_read_the_last_words(pair):
    here, there = pair
    here.sendall(b"x" * 50_000)  # never read by the other end
    there.sendall(b"last words")
    draining = threading.Thread(target=sockets.drain, args=(there, 10.0), daemon=True)
    draining.start()
    assert here.recv(100) == b"last words"
    assert here.recv(1) == b""
    here.close()
    draining.join(60)
    assert not draining.is_alive()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.3.2.1", "127.3.2.1"),
        ("localhost", "127.0.0.1"),
        pytest.param("job-pserver-0.job.default.svc", "", id="a-name"),
        pytest.param("192.0.2.1", "", id="an-address-of-another-machine"),
    ],
)
def test_what_is_bound_is_an_address_of_this_machine_or_everything(host, expected):
    assert sockets.bind_address(host) == expected


def test_every_interface_can_be_listened_on():
    with sockets.listen("") as listening:
        host, port = listening.getsockname()[:2]
        assert host in ("::", "0.0.0.0")
        sockets.dial("127.0.0.1", port, timeout_seconds=5.0, buffer_bytes=None).close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_the_system_tells_how_many_bytes_have_moved_inside_of_a_buffer_too(pair):
    here, there = pair
    assert sockets.bytes_moved(there) == (0, 0)
    before = sockets.bytes_moved(here)  # the opening of the connection counts as a byte
    assert before is not None
    here.sendall(b"x" * 1000)
    wait_for(lambda: sockets.bytes_moved(there) == (0, 1000), "the bytes at the other end")
    wait_for(lambda: sockets.bytes_moved(here) == (before.acknowledged + 1000, 0), "the acknowledgement")
    there.close()
    assert sockets.bytes_moved(there) is None


def test_a_connection_is_given_up_once_the_peer_has_closed_it_and_nothing_is_left_to_be_read(pair):
    here, there = pair
    there.settimeout(7.0)
    assert not sockets.is_given_up(there)
    here.sendall(b"x")
    here.close()
    wait_for(lambda: there.recv(1, socket.MSG_PEEK), "the byte")
    assert not sockets.is_given_up(there)
    assert there.recv(1) == b"x"
    wait_for(lambda: sockets.is_given_up(there), "the end")
    assert there.gettimeout() == 7.0
    there.close()
    assert sockets.is_given_up(socket.socket())  # not connected any more


@pytest.fixture
def unix_pair() -> Iterator[Pair]:
    listener, name = sockets.listen_here()
    with listener, sockets.dial_here(name, timeout_seconds=5.0, buffer_bytes=4096) as dialled:
        accepted, _ = listener.accept()
        with accepted:
            yield dialled, accepted


def test_names_differ_and_end_with_their_listener():
    (first, name), (second, other) = sockets.listen_here(), sockets.listen_here()
    first.close()
    second.close()
    assert name != other
    with pytest.raises(ConnectionRefusedError):
        sockets.dial_here(name, timeout_seconds=5.0, buffer_bytes=None)


def test_another_user_is_refused_at_both_ends(unix_pair, monkeypatch):
    _, accepted = unix_pair
    sockets.check_user(accepted)
    listener, name = sockets.listen_here()
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {us}, expected {us + 1}"):
        sockets.check_user(accepted)
    with listener, pytest.raises(PermissionError):
        sockets.dial_here(name, timeout_seconds=5.0, buffer_bytes=None)
