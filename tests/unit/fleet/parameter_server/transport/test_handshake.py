"""Data ports accept one connection after the other; descriptors pass over those of this host."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from fleet.parameter_server.settings import Settings
from fleet.parameter_server.transport import handshake, sockets
from fleet.parameter_server.transport.handshake import DataPorts
from fleet.parameter_server.transport.sockets import ConnectionEndedError

HOST = "127.0.0.1"
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataPorts]:
    monkeypatch.setattr(handshake, "accept", lambda connected, *_: connected.close())
    made = DataPorts(HOST, Settings(transport="tcp"), lambda identity: pytest.fail(f"{identity} greets"))
    made.start()
    yield made
    made.close()


def test_a_connection_for_which_there_is_no_thread_is_closed_and_the_next_is_taken(
    ports: DataPorts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    start, refused, greeted = threading.Thread.start, list[str](), list[str]()

    def refuses_once(thread: threading.Thread) -> None:
        if thread.name == "fleet-greet" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        greeted.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses_once)
    for _ in range(2):
        with socket.create_connection((HOST, ports.port), 10) as connected:
            assert connected.recv(1) == b""
    assert (refused, greeted) == (["fleet-greet"], ["fleet-greet"])
    assert f"cannot take a data connection from {HOST}: can't start new thread" in caplog.text


@pytest.fixture
def pair() -> Iterator[Pair]:
    listener, name = sockets.listen_here()
    with listener, sockets.dial_here(name, timeout_seconds=5.0, buffer_bytes=4096) as dialled:
        accepted, _ = listener.accept()
        with accepted:
            yield dialled, accepted


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_descriptors_arrive_with_their_bytes_whatever_the_buffers(pair, size):
    dialled, accepted = pair
    payload = os.urandom(size)
    read_end, write_end = os.pipe()
    sending = threading.Thread(target=handshake.send_with, args=(dialled, payload, [read_end]))
    sending.start()
    received = memoryview(bytearray(size))
    (descriptor,) = handshake.receive_with(accepted, received)
    sending.join()
    os.write(write_end, b"!")
    assert (bytes(received), os.read(descriptor, 1)) == (payload, b"!")
    assert not os.get_inheritable(descriptor)
    for each in (descriptor, read_end, write_end):
        os.close(each)


def test_bytes_without_descriptors_pass_too(pair):
    dialled, accepted = pair
    handshake.send_with(dialled, b"hello", [])
    received = memoryview(bytearray(5))
    assert handshake.receive_with(accepted, received) == []
    assert bytes(received) == b"hello"


@pytest.mark.parametrize("sent", [b"", b"he"], ids=["at-once", "halfway"])
def test_an_end_before_all_has_come_is_told(pair, sent):
    dialled, accepted = pair
    dialled.sendall(sent)
    dialled.close()
    with pytest.raises(ConnectionEndedError):
        handshake.receive_with(accepted, memoryview(bytearray(5)))
