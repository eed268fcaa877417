"""What is passed on between two connections: all of it, both ways, and each way's end."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from fleet.process.relay import pass_on


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends, between which a pair passes on."""
    (here, one), (other, there) = socket.socketpair(), socket.socketpair()
    for each in (here, there):
        each.settimeout(20)
    pass_on(one, other)
    with here, there:
        yield here, there


def received(end: socket.socket) -> bytes:
    """Return all that comes until the end."""
    return b"".join(iter(lambda: end.recv(1 << 16), b""))


def test_more_than_the_other_end_takes_at_once_comes_whole_both_ways(ends):
    here, there = ends
    sent = [os.urandom(3 << 20) for _ in ends]

    def send(end: socket.socket, what: bytes) -> None:
        end.sendall(what)
        end.shutdown(socket.SHUT_WR)

    senders = [threading.Thread(target=send, args=each) for each in zip(ends, sent, strict=True)]
    for sender in senders:
        sender.start()
    assert received(there) == sent[0]
    assert received(here) == sent[1]
    for sender in senders:
        sender.join()


def test_the_end_of_one_way_leaves_the_other_open(ends):
    here, there = ends
    here.sendall(b"a question")
    here.shutdown(socket.SHUT_WR)
    assert received(there) == b"a question"
    there.sendall(b"an answer")
    assert here.recv(100) == b"an answer"
    there.close()
    assert here.recv(100) == b""


def test_who_is_gone_ends_both_ways(ends):
    here, there = ends
    there.close()
    assert here.recv(100) == b""
    with pytest.raises(OSError, match=r"[Bb]roken pipe|[Rr]eset"):
        here.sendall(b"x" * (16 << 20))
