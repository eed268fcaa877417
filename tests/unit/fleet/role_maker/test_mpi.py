"""mpirun's environment becomes a role: even ranks serve, odd ranks train."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from fleet import role_maker
from fleet.errors import DeadlineExceededError, RoleError
from fleet.mpi import rendezvous
from fleet.mpi.rendezvous import Card, exchange
from fleet.role_maker import MPISymmetricRoleMaker
from tests.support.processes import free_ports, wait_for
from tests.support.threads import at_once

ONE_HOST = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_ess_base_jobid": "390463489",
}
TWO_HOSTS = {
    **ONE_HOST,
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "390463488.0;tcp://10.0.0.5,172.17.0.1:36617;tcp6://[fd00::2]:49329",
}
ENDPOINTS = ("10.0.0.5:7000", "", "10.0.0.6:7001", "")


class Exchange:
    """Stands in for the others; remembers what it was asked with."""

    card: Card

    def __call__(self, card: Card) -> tuple[str, ...]:
        self.card = card
        return ENDPOINTS


def make(rank: int, environ: dict[str, str]) -> tuple[Any, Card]:
    exchanged = Exchange()
    maker = MPISymmetricRoleMaker(exchanged)
    return maker.generate_role({"OMPI_COMM_WORLD_RANK": str(rank), **environ}), exchanged.card


@pytest.mark.parametrize(
    ("rank", "is_server", "index", "endpoint"),
    [(0, True, 0, "10.0.0.5:7000"), (1, False, 0, ""), (2, True, 1, "10.0.0.6:7001"), (3, False, 1, "")],
)
def test_even_ranks_serve_and_odd_ranks_train(rank, is_server, index, endpoint):
    role, card = make(rank, ONE_HOST)
    assert (role.is_server, role.index, role.current_endpoint) == (is_server, index, endpoint)
    assert (role.worker_num, role.server_endpoints) == (2, ("10.0.0.5:7000", "10.0.0.6:7001"))
    assert role.job.uid == "390463489"
    assert card.serves is is_server


def test_the_originals_spelling_is_the_same_class():
    assert role_maker.MPISymetricRoleMaker is role_maker.MPISymmetricRoleMaker


@pytest.mark.parametrize(
    ("environ", "hosts", "port"),
    [
        pytest.param(ONE_HOST, ("127.0.0.1",), None, id="one-host"),
        pytest.param(TWO_HOSTS, ("10.0.0.5", "172.17.0.1"), None, id="mpiruns-host"),
        pytest.param({**TWO_HOSTS, "FLEET_MPI_RENDEZVOUS": "node-7:4000"}, ("node-7",), 4000, id="as-told"),
    ],
)
def test_rank_zero_is_looked_for_where_it_may_be(environ, hosts, port):
    card = make(1, environ)[1]
    assert (card.hosts, card.port) == (hosts, port)
    assert card.deadline_seconds == 180


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"OMPI_COMM_WORLD_SIZE": "3"}, r"is '3'; expected an even number.*-np 4", id="odd"),
        pytest.param({"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE is empty", id="no-size"),
        pytest.param({"FLEET_MPI_RENDEZVOUS": "node"}, "FLEET_MPI_RENDEZVOUS is 'node'", id="no-port"),
        pytest.param({"FLAGS_rpc_deadline": "soon"}, "FLAGS_rpc_deadline is 'soon'", id="deadline"),
        pytest.param(
            {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "expected FLEET_MPI_RENDEZVOUS=host:port", id="nowhere"
        ),
    ],
)
def test_what_describes_no_rank_is_named(changes, words):
    with pytest.raises(RoleError, match=words):
        make(0, {**ONE_HOST, **changes})


def test_outside_of_mpirun_the_missing_variable_is_named():
    with pytest.raises(RoleError, match="OMPI_COMM_WORLD_SIZE is not set"):
        MPISymmetricRoleMaker(Exchange()).generate_role({})


def card(rank: int, job: str, size: int = 4, seconds: float = 20.0) -> Card:
    return Card(job, rank, size, ("127.0.0.1",), None, rank % 2 == 0, seconds)


def test_the_ranks_of_two_jobs_find_their_own_addresses():
    jobs = ("mpi-test-a", "mpi-test-b")
    cards = [card(rank, job) for rank in (3, 1, 0, 2) for job in jobs]
    results = dict(zip(cards, at_once(*(lambda c=each: exchange(c) for each in cards)), strict=True))
    for job in jobs:
        of_job = {results[each] for each in cards if each.job == job}
        (endpoints,) = of_job  # everybody has been told the same
        assert [endpoint != "" for endpoint in endpoints] == [True, False, True, False]
        assert endpoints[0] != endpoints[2]


@pytest.mark.parametrize(
    ("first", "ends", "expected"),
    [
        pytest.param(
            "127.0.0.1",
            {1: ("127.0.0.1", "127.0.0.1")},
            {0: "127.0.0.1", 1: "127.0.0.1"},
            id="one-host",
        ),
        pytest.param(
            "node-a",
            {2: ("10.0.0.5", "10.0.0.6"), 1: ("127.0.1.1", "127.0.0.1")},
            {0: "10.0.0.5", 1: "10.0.0.5", 2: "10.0.0.6"},
            id="a-name-that-means-loopback-on-its-own-host-only",
        ),
        pytest.param(
            "10.0.0.5",
            {1: ("127.0.0.1", "127.0.0.1")},
            {0: "10.0.0.5", 1: "127.0.0.1"},
            id="loopback-says-nothing-about-a-known-address",
        ),
    ],
)
def test_nobody_is_told_a_loopback_address_of_another_host(first, ends, expected):
    assert rendezvous._hosts(first, ends) == expected


def test_a_rank_that_never_comes_is_named_on_both_sides():
    with pytest.raises(
        DeadlineExceededError, match=r"rank 0 waited 0\.5 s on port \d+ for the ranks 1, 2, 3"
    ):
        exchange(card(0, "mpi-test-c", seconds=0.5))
    with pytest.raises(DeadlineExceededError, match=r"rank 1 found no rank 0.*FLEET_MPI_RENDEZVOUS"):
        exchange(card(1, "mpi-test-d", seconds=0.5))


def is_free(port: int) -> bool:
    """Whether no other test has a port: a job's name says which ones it tries."""
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


@contextmanager
def in_the_way(port: int, banner: bytes = b"") -> Iterator[None]:
    """Be another program that has a port: it accepts, says its banner, and nothing else."""
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", port)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    accepted.append(listener.accept()[0])
                    accepted[-1].sendall(banner)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)  # wakes up accept()
        thread.join(5)
        for each in accepted:
            each.close()


@pytest.mark.parametrize(
    "banner", [pytest.param(b"", id="silent"), b"SSH-2.0-OpenSSH\n", pytest.param(b"\x06no\n", id="garbled")]
)
def test_another_program_on_the_first_port_holds_nobody(monkeypatch, banner):
    monkeypatch.setattr(rendezvous, "_HEARD_SECONDS", 0.3)
    names = (f"mpi-test-e{number}" for number in count())
    job = next(name for name in names if is_free(card(0, name).ports[0]))
    cards = [card(rank, job, size=2) for rank in (0, 1)]
    with in_the_way(cards[0].ports[0], banner):
        results = at_once(*(lambda c=each: exchange(c) for each in cards), seconds=10)
    assert results[0] == results[1]


def test_ranks_that_have_the_key_find_each_other_and_no_other_rank_does():
    ours = [replace(card(rank, "mpi-test-h"), key=b"k" * 32) for rank in range(4)]
    strangers = [replace(card(1, "mpi-test-h", seconds=1.0), key=key) for key in (b"", b"o" * 32)]

    def find_nobody(stranger: Card) -> None:
        with pytest.raises(DeadlineExceededError):
            exchange(stranger)

    waiting = [lambda c=each: find_nobody(c) for each in strangers]
    *_, last = ours
    early = [lambda c=each: exchange(c) for each in ours[:-1]]

    def come_last() -> tuple[str, ...]:
        wait_for(lambda: not any(thread.is_alive() for thread in began), "the strangers to give up")
        return exchange(last)

    began = [threading.Thread(target=each, daemon=True) for each in waiting]
    for thread in began:
        thread.start()
    results = at_once(*early, come_last)
    assert len(set(results)) == 1


def test_a_rank_has_the_key_that_mpirun_handed_over():
    role, card = make(0, {**ONE_HOST, "FLEET_JOB_KEY": "6b" * 32})
    assert role.job.key == card.key == b"k" * 32


def test_without_a_key_rank_zero_listens_on_loopback_only_and_says_so(caplog):
    (port,) = free_ports(1)
    first = Card("mpi-test-j", 0, 2, ("node-a",), port, True, 20.0)
    with rendezvous._listen(first) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    assert "no key of the job (FLEET_JOB_KEY), so it listens on 127.0.0.1 only" in caplog.text


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 10):
        return True
    return False


def greet(first: Card, rank: int, port: int, host: str = "127.0.0.1") -> socket.socket:
    """Be a rank as far as to the byte that says that it was heard."""
    connected = socket.create_connection((host, first.port or 0), 10)
    challenge = connected.recv(32, socket.MSG_WAITALL) if first.key else b""
    mac = rendezvous._mac(first, challenge, "rank", rank, port)
    connected.sendall(json.dumps({"job": first.job, "rank": rank, "port": port, "mac": mac}).encode() + b"\n")
    assert connected.recv(1) == rendezvous._HEARD
    return connected


def test_a_rank_that_has_lost_its_connection_may_come_again():
    (port,) = free_ports(1)
    first = Card("mpi-test-f", 0, 3, ("127.0.0.1",), port, True, 20.0)
    results: list[tuple[str, ...]] = []
    thread = threading.Thread(target=lambda: results.append(exchange(first)), daemon=True)
    thread.start()
    wait_for(lambda: listens(port), "rank 0")
    greet(first, 1, 7001).close()
    with greet(first, 2, 7003) as other, greet(first, 1, 7002) as again:
        answers = [json.loads(connected.makefile().readline()) for connected in (again, other)]
    thread.join(10)
    assert [answer["endpoints"] for answer in answers] == [list(results[0])] * 2
    assert results[0][1:] == ("127.0.0.1:7002", "127.0.0.1:7003")


def own_address() -> str:
    """Return the address by which other hosts would know this one."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # a choice of route; nothing is sent
        return str(probe.getsockname()[0])
    pytest.skip("this machine has loopback addresses only")


def test_a_rank_beside_rank_zero_hides_nobodys_address_from_other_hosts():
    address = own_address()
    (port,) = free_ports(1)
    first = Card("mpi-test-g", 0, 3, ("node-a",), port, True, 20.0, b"k" * 32)
    results: list[tuple[str, ...]] = []
    thread = threading.Thread(target=lambda: results.append(exchange(first)), daemon=True)
    thread.start()
    wait_for(lambda: listens(port), "rank 0")
    with greet(first, 2, 7003, address), greet(first, 1, 7002):
        thread.join(10)
    assert results[0][0].rpartition(":")[0] == address
    assert results[0][1:] == (f"{address}:7002", f"{address}:7003")


def test_many_that_keep_silent_keep_no_rank_waiting():
    """Each may be silent for two seconds: one after the other they would take longer than the deadline."""
    cards = [replace(card(rank, "mpi-test-k", size=2, seconds=15.0), key=b"k" * 32) for rank in (0, 1)]
    results: list[tuple[str, ...]] = []
    thread = threading.Thread(target=lambda: results.append(exchange(cards[0])), daemon=True)
    thread.start()
    port = cards[0].ports[0]
    wait_for(lambda: listens(port), "rank 0")
    with ExitStack() as opened:
        for _ in range(40):
            opened.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        results.append(exchange(cards[1]))
        thread.join(10)
    assert results[0] == results[1]


def test_whoever_says_a_line_byte_by_byte_is_heard_for_so_long_only():
    ended = threading.Event()

    def drip(connected: socket.socket) -> None:
        while not ended.wait(0.02):
            connected.sendall(b"x")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=drip, args=(theirs,), daemon=True)
        thread.start()
        try:
            with pytest.raises(TimeoutError):
                rendezvous._line(ours, time.monotonic() + 0.3)
        finally:
            ended.set()
            thread.join(5)


def test_ports_that_cannot_be_listened_on_are_told_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RoleError, match=rf"cannot listen on {port}: Address already in use"):
            exchange(Card("mpi-test-g", 0, 2, ("127.0.0.1",), port, True, 1.0))
