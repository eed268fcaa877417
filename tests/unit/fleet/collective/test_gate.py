"""Who gets through the gate before a store, and what the others are told: nothing."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet.collective.gate import door_to, gate_before, is_here, loopback_of
from fleet.process.half_open import HalfOpen
from fleet.process.relay import Relay
from fleet.wire import Side
from fleet.wire.proof import CHALLENGE_BYTES, MAC_BYTES, greeting_mac
from tests.support.processes import wait_for

KEY, OTHER = b"k" * 32, b"o" * 32
HOST = "127.0.0.1"


@pytest.fixture
def store() -> Iterator[socket.socket]:
    """Listen as a store would."""
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(10)
        yield listener


@pytest.fixture
def gate(store: socket.socket) -> Iterator[Relay]:
    made = gate_before(store.getsockname()[1], socket.create_server((HOST, 0)), KEY)
    yield made
    made.close()


def test_who_has_the_key_speaks_with_the_store(store: socket.socket, gate: Relay):
    door = door_to(HOST, gate.port, KEY)
    with contextlib.closing(door), socket.create_connection((HOST, door.port), 10) as trainer:
        trainer.sendall(b"asked")
        there, _ = store.accept()
        with there:
            there.settimeout(10)
            assert there.recv(5, socket.MSG_WAITALL) == b"asked"
            there.sendall(bytes(1 << 20))
            left = 1 << 20
            while left:
                part = trainer.recv(left)
                assert part, f"{left} bytes are missing"
                left -= len(part)
            trainer.close()
            assert there.recv(1) == b"", "the end is passed on"


def test_a_door_waits_for_a_gate_that_comes_later(store: socket.socket):
    with socket.create_server((HOST, 0)) as reserved:
        port = reserved.getsockname()[1]
    door = door_to(HOST, port, KEY, patience_seconds=10)
    with contextlib.closing(door), socket.create_connection((HOST, door.port), 10) as trainer:
        trainer.sendall(b"asked")
        gate = gate_before(store.getsockname()[1], socket.create_server((HOST, port)), KEY)
        with contextlib.closing(gate):
            there, _ = store.accept()
            with there:
                there.settimeout(10)
                assert there.recv(5, socket.MSG_WAITALL) == b"asked"
    assert door.refusal == ""


def says_nothing(connected: socket.socket) -> None:
    connected.shutdown(socket.SHUT_WR)


def speaks_as_the_stores_client(connected: socket.socket) -> None:
    connected.sendall(bytes(CHALLENGE_BYTES + MAC_BYTES))


def has_another_key(connected: socket.socket) -> None:
    challenge, answer = connected.recv(CHALLENGE_BYTES, socket.MSG_WAITALL), bytes(CHALLENGE_BYTES)
    connected.sendall(answer + greeting_mac(OTHER, Side.TRAINER, challenge, answer, of="store"))


def proves_what_was_meant_for_a_data_connection(connected: socket.socket) -> None:
    challenge, answer = connected.recv(CHALLENGE_BYTES, socket.MSG_WAITALL), bytes(CHALLENGE_BYTES)
    connected.sendall(answer + greeting_mac(KEY, Side.TRAINER, challenge, answer))


def repeats_what_was_overheard(connected: socket.socket) -> None:
    answer = bytes(CHALLENGE_BYTES)
    connected.sendall(answer + greeting_mac(KEY, Side.TRAINER, answer, answer, of="store"))


@pytest.mark.parametrize(
    "stranger",
    [
        says_nothing,
        speaks_as_the_stores_client,
        has_another_key,
        proves_what_was_meant_for_a_data_connection,
        repeats_what_was_overheard,
    ],
)
def test_a_stranger_reaches_no_store_and_is_told_nothing(
    stranger: Callable[[socket.socket], None], store: socket.socket, gate: Relay, caplog
):
    with socket.create_connection((HOST, gate.port), 10) as connected:
        stranger(connected)
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while more := connected.recv(1 << 16):
                heard += more
    assert len(heard) <= CHALLENGE_BYTES
    store.settimeout(0.2)
    with pytest.raises(TimeoutError):
        store.accept()
    assert "give all trainers the same FLEET_JOB_KEY" in caplog.text


def test_a_trainer_with_another_key_learns_why(gate: Relay):
    door = door_to(HOST, gate.port, OTHER)
    with contextlib.closing(door), socket.create_connection((HOST, door.port), 10) as trainer:
        assert trainer.recv(1) == b""
    assert "give all trainers the same FLEET_JOB_KEY" in door.refusal


def test_a_trainer_tells_nothing_to_what_cannot_prove_the_key(store: socket.socket):
    door = door_to(HOST, store.getsockname()[1], KEY)
    with contextlib.closing(door), socket.create_connection((HOST, door.port), 10) as trainer:
        trainer.sendall(b"secret")
        impostor, _ = store.accept()
        with impostor:
            impostor.settimeout(10)
            impostor.sendall(bytes(CHALLENGE_BYTES))
            impostor.recv(CHALLENGE_BYTES + MAC_BYTES, socket.MSG_WAITALL)
            impostor.sendall(bytes(MAC_BYTES))
            assert impostor.recv(100) == b""
        with contextlib.suppress(ConnectionResetError):  # what it said was passed on to nobody
            assert trainer.recv(100) == b""
    assert "has not the key of this job" in door.refusal


def test_of_many_that_prove_nothing_few_are_kept_and_none_keeps_a_trainer_out(store: socket.socket):
    listener = socket.create_server((HOST, 0))
    gate = gate_before(store.getsockname()[1], listener, KEY, HalfOpen(most=4))
    with contextlib.closing(gate), contextlib.ExitStack() as opened:
        kept = [opened.enter_context(socket.create_connection((HOST, gate.port), 10)) for _ in range(20)]
        door = door_to(HOST, gate.port, KEY)
        opened.callback(door.close)
        trainer = opened.enter_context(socket.create_connection((HOST, door.port), 10))
        trainer.sendall(b"asked")
        there, _ = store.accept()
        with there:
            there.settimeout(10)
            assert there.recv(5, socket.MSG_WAITALL) == b"asked"

        def let_go(connected: socket.socket) -> bool:
            connected.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                return len(connected.recv(100, socket.MSG_WAITALL)) <= CHALLENGE_BYTES
            return False

        wait_for(lambda: sum(map(let_go, kept)) >= 16, "the oldest to be given up")


def test_many_connections_take_no_thread_each(store: socket.socket, gate: Relay):
    door = door_to(HOST, gate.port, KEY)
    before = len(named_gate())  # two that accept at least, and perhaps the one that passes on
    with contextlib.closing(door), contextlib.ExitStack() as opened:
        pairs = []
        for _ in range(50):
            trainer = opened.enter_context(socket.create_connection((HOST, door.port), 10))
            pairs.append((trainer, opened.enter_context(store.accept()[0])))
        wait_for(lambda: len(named_gate()) <= before + 1, "the threads that greeted to end")
        for number, (trainer, there) in enumerate(pairs):
            trainer.sendall(bytes([number]))
            there.sendall(bytes([number + 100]))
        for number, (trainer, there) in enumerate(pairs):
            there.settimeout(10)
            assert (there.recv(1), trainer.recv(1)) == (bytes([number]), bytes([number + 100]))


def test_a_gate_for_which_there_is_no_thread_takes_the_next_connection(
    store: socket.socket, gate: Relay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    start, refused = threading.Thread.start, list[threading.Thread]()

    def refuses_once(thread: threading.Thread) -> None:
        if thread.name == "fleet-gate" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses_once)
    with socket.create_connection((HOST, gate.port), 10) as connected:
        assert connected.recv(1) == b""
    with socket.create_connection((HOST, gate.port), 10) as connected:
        assert len(connected.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
    assert "a connection could not be taken: can't start new thread; trying again" in caplog.text


def sockets() -> int:
    """Return how many sockets this process has open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(link.readlink()).startswith("socket:")
    return count


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is open")
def test_forked_children_keep_neither_ports_nor_connections_open(store: socket.socket, gate: Relay):
    """Workers that outlive a killed trainer would keep its port taken, and its peers waiting."""
    door = door_to(HOST, gate.port, KEY)
    with contextlib.closing(door), socket.create_connection((HOST, door.port), 10) as trainer:
        trainer.sendall(b"asked")
        there, _ = store.accept()
        with there:
            assert there.recv(5, socket.MSG_WAITALL) == b"asked"
            before = sockets()
            if (child := os.fork()) == 0:
                os._exit(before - sockets())
            closed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert closed >= 6, "two ports, and both ends of what the door and the gate pass on"


def named_gate() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fleet-gate"]


def test_a_greeting_has_a_deadline_as_a_whole(store: socket.socket):
    gate = gate_before(store.getsockname()[1], socket.create_server((HOST, 0)), KEY, HalfOpen(seconds=0.2))
    with contextlib.closing(gate), socket.create_connection((HOST, gate.port), 10) as slow:
        assert len(slow.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        assert slow.recv(1) == b""


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.3.2.1", "127.3.2.1"),
        ("localhost", "127.0.0.1"),
        ("::1", "::1"),
        ("192.0.2.1", None),
    ],
)
def test_what_is_reached_from_this_machine_alone(host: str, address: str | None):
    assert loopback_of(host) == address


def test_an_address_of_this_machine():
    assert is_here("127.0.0.1")
    assert not is_here("192.0.2.1")  # kept for documentation: nobody has it
