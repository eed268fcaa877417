"""Sockets between processes of one host: who may connect, and what passes over them."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from fleet.parameter_server.transport.local_sockets import (
    check_user,
    dial_here,
    listen_here,
    receive_with,
    send_with,
)
from fleet.parameter_server.transport.sockets import ConnectionEndedError

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    listener, name = listen_here()
    with listener, dial_here(name, timeout_seconds=5.0, buffer_bytes=4096) as dialled:
        accepted, _ = listener.accept()
        with accepted:
            yield dialled, accepted


def test_names_differ_and_end_with_their_listener():
    (first, name), (second, other) = listen_here(), listen_here()
    first.close()
    second.close()
    assert name != other
    with pytest.raises(ConnectionRefusedError):
        dial_here(name, timeout_seconds=5.0, buffer_bytes=None)


def test_another_user_is_refused_at_both_ends(pair, monkeypatch):
    _, accepted = pair
    check_user(accepted)
    listener, name = listen_here()
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {us}, expected {us + 1}"):
        check_user(accepted)
    with listener, pytest.raises(PermissionError):
        dial_here(name, timeout_seconds=5.0, buffer_bytes=None)


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_descriptors_arrive_with_their_bytes_whatever_the_buffers(pair, size):
    dialled, accepted = pair
    payload = os.urandom(size)
    read_end, write_end = os.pipe()
    sending = threading.Thread(target=send_with, args=(dialled, payload, [read_end]))
    sending.start()
    received = memoryview(bytearray(size))
    (descriptor,) = receive_with(accepted, received)
    sending.join()
    os.write(write_end, b"!")
    assert (bytes(received), os.read(descriptor, 1)) == (payload, b"!")
    assert not os.get_inheritable(descriptor)
    for each in (descriptor, read_end, write_end):
        os.close(each)


def test_bytes_without_descriptors_pass_too(pair):
    dialled, accepted = pair
    send_with(dialled, b"hello", [])
    received = memoryview(bytearray(5))
    assert receive_with(accepted, received) == []
    assert bytes(received) == b"hello"


@pytest.mark.parametrize("sent", [b"", b"he"], ids=["at-once", "halfway"])
def test_an_end_before_all_has_come_is_told(pair, sent):
    dialled, accepted = pair
    dialled.sendall(sent)
    dialled.close()
    with pytest.raises(ConnectionEndedError):
        receive_with(accepted, memoryview(bytearray(5)))
