"""Limits of half-open connections, relays, and what forked children keep of their parent's sockets."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from fleet.process.connections import ConnectionLimit, own, relay


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two sockets with a relay between them."""
    (here, one), (other, there) = socket.socketpair(), socket.socketpair()
    for each in (here, there):
        each.settimeout(20)
    relay(one, other)
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


@pytest.mark.parametrize(
    ("hosts", "evicted"),
    [
        pytest.param("abc", 0, id="of-as-many-hosts-the-oldest"),
        pytest.param("abbc", 1, id="the-oldest-of-the-host-that-has-most"),
        pytest.param("abba", 0, id="of-two-such-hosts-the-oldest"),
        pytest.param("bccccca", 1, id="no-host-pays-for-another"),
    ],
)
def test_the_host_with_most_connections_loses_its_oldest(hosts: str, evicted: int):
    limit = ConnectionLimit[int](len(hosts) - 1)
    gone = [limit.add(number, host) for number, host in enumerate(hosts)]
    assert gone == [None] * (len(hosts) - 1) + [evicted]


def test_a_removed_connection_makes_room_once():
    limit = ConnectionLimit[int](2)
    limit.add(0, "a")
    limit.add(1, "a")
    for _ in range(2):
        limit.remove(0, "a")
    assert limit.add(2, "b") is None
    assert limit.add(3, "b") == 2


def test_a_forked_child_closes_its_copies_of_what_is_owned_and_of_nothing_else():
    ours, other = socket.socketpair()
    with own(ours), other:
        if (child := os.fork()) == 0:
            os._exit((ours.fileno(), other.fileno() >= 0) != (-1, True))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ours.sendall(b"x")
        assert other.recv(1) == b"x"
