"""How the trainers of a collective job wait for each other, and what the gate lets through."""

import contextlib
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from fleet.collective import rendezvous
from fleet.collective.devices import Facts, backend_of
from fleet.collective.group import TextExchange, compare_facts
from fleet.collective.rendezvous import (
    JoinWait,
    join,
    open_gate,
    open_shared_store,
    open_tunnel,
    shared_world,
)
from fleet.collective.world import World
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError, DeadlineExceededError
from fleet.process.connections import HalfOpen, Relay
from fleet.wire import Side
from fleet.wire.proof import CHALLENGE_BYTES, MAC_BYTES, greeting_mac
from tests.support.counted_store import CountedStore
from tests.support.processes import wait_for

KEY, OTHER = b"k" * 32, b"o" * 32
HOST = "127.0.0.1"
pytestmark = pytest.mark.timeout(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        pytest.param(0, r"trainer 1 did not join within", id="trainer-0-waits-for-the-others"),
        pytest.param(1, r"did not listen at 127.0.0.1:\d+ within", id="the-others-wait-for-trainer-0"),
    ],
)
def test_trainers_that_never_joined_have_a_deadline_of_their_own(rank, said, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "ATTEMPT_SECONDS", 0.2)
    world = World(rank, 2, "127.0.0.1", free_port())
    with pytest.raises(DeadlineExceededError, match=said) as raised:
        open_shared_store(world, Deadlines(deadline_seconds=0.1, start_deadline_seconds=1.5))
    seconds = float(str(raised.value).split("within ")[1].split(" s")[0])
    assert seconds >= 1.0, "not that for a lost one"
    assert "FLEET_START_DEADLINE_SECONDS" in str(raised.value)
    assert caplog.text.count("waiting for trainer") >= 1


def reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="only there 127.0.0.2 is an address of every machine")
def test_the_store_of_a_local_run_listens_on_loopback_only():
    """torch's own listens on every interface, and knows no key."""
    port = free_port()
    store = open_shared_store(World(0, 1, "127.0.0.1", port), Deadlines(deadline_seconds=5.0))
    assert reaches("127.0.0.1", port)
    assert not reaches("127.0.0.2", port)
    store.set("said", "so")
    assert store.get("said") == b"so"


@pytest.mark.parametrize("host", ["localhost", "192.0.2.1"], ids=["a-name", "an-address-that-others-reach"])
def test_without_a_key_the_store_listens_on_loopback_only(host, caplog):
    port = free_port()
    store = open_shared_store(World(0, 1, host, port), Deadlines(deadline_seconds=5.0))
    store.set("said", "so")
    assert reaches("127.0.0.1", port)
    assert not reaches("127.0.0.2", port)
    assert ("no key of the job (FLEET_JOB_KEY)" in caplog.text) is (host != "localhost")


@pytest.mark.parametrize(
    ("rank", "hosts"),
    [
        pytest.param(0, ("127.0.0.1", "192.0.2.9"), id="trainer-0-of-a-list-that-names-another-machine"),
        pytest.param(1, ("0.0.0.0", "192.0.2.9"), id="another-of-its-machine"),
        pytest.param(2, ("192.0.2.9", "127.0.0.1"), id="one-of-another-machine"),
        pytest.param(1, ("192.0.2.9", ""), id="one-that-is-told-where-trainer-0-is-only"),
        pytest.param(1, ("192.0.2.9", "no-such-host.invalid"), id="beside-a-name-that-is-not-known"),
    ],
)
def test_without_a_key_several_machines_are_refused_at_once(rank, hosts, monkeypatch):
    monkeypatch.setattr(rendezvous, "loopback_of", lambda host: None if host == hosts[0] else host)
    endpoints = tuple(f"{host}:6170" for host in hosts for _ in range(2)) if hosts[1] else ()
    world = World(rank, 4, hosts[0], free_port(), endpoints)
    with pytest.raises(
        ConfigurationError, match=r"192\.0\.2\.9 is another machine.*set FLEET_JOB_KEY"
    ) as raised:
        open_shared_store(world, Deadlines(deadline_seconds=30.0))
    assert str(raised.value).startswith("this trainer has no key of the job")


def test_a_host_is_refused_once_it_resolves_to_another_machine(monkeypatch):
    monkeypatch.setattr(rendezvous, "ATTEMPT_SECONDS", 0.2)
    known = iter([False, True])
    monkeypatch.setattr(rendezvous, "is_elsewhere", lambda _: next(known))
    with pytest.raises(ConfigurationError, match=r"no-such-host\.invalid is another machine"):
        open_shared_store(World(1, 2, "no-such-host.invalid", free_port()), Deadlines(deadline_seconds=30.0))


def met(worlds: list[World]) -> list[Store]:
    deadlines = Deadlines(deadline_seconds=20.0)
    with ThreadPoolExecutor(len(worlds)) as threads:
        return list(threads.map(lambda world: open_shared_store(world, deadlines), worlds))


def test_with_a_key_trainers_meet_at_a_store_behind_a_gate():
    port = free_port()
    first, second = met([World(rank, 2, "127.0.0.1", port, key=KEY) for rank in range(2)])
    second.set("said", "so")
    assert first.get("said") == second.clone().get("said") == b"so"
    stranger = timedelta(seconds=1)
    with pytest.raises((DistError, RuntimeError)):
        TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=stranger).get("said")


def test_a_gate_closes_with_its_store():
    port = free_port()
    store = open_shared_store(World(0, 1, "127.0.0.1", port, key=KEY), Deadlines(deadline_seconds=5.0))
    assert reaches("127.0.0.1", port)
    del store
    gc.collect()
    assert not reaches("127.0.0.1", port)


def test_an_error_tells_a_trainer_with_another_key_what_to_do(monkeypatch):
    monkeypatch.setattr(rendezvous, "ATTEMPT_SECONDS", 0.2)
    tunnels = []

    def noted(*of: Any) -> Relay:
        tunnels.append(open_tunnel(*of))
        return tunnels[-1]

    monkeypatch.setattr(rendezvous, "open_tunnel", noted)
    port = free_port()
    others = World(1, 2, "127.0.0.1", port, key=OTHER)
    deadlines = Deadlines(deadline_seconds=0.1, start_deadline_seconds=1.5)
    with ThreadPoolExecutor(2) as threads:
        alone = threads.submit(open_shared_store, World(0, 2, "127.0.0.1", port, key=KEY), deadlines)
        with pytest.raises(DeadlineExceededError, match="the same FLEET_JOB_KEY"):
            open_shared_store(others, deadlines)
        with pytest.raises(DeadlineExceededError, match="trainer 1 did not join"):
            alone.result()
    (tunnel,) = tunnels
    assert not reaches("127.0.0.1", tunnel.port), "it is closed where nobody goes through it any more"


def test_keys_of_an_earlier_start_are_not_read_from_a_launchers_store():
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lives = [
        met([World(0, 1, "127.0.0.1", agents.port, launcher_has_store=True, launcher_restarts=life)])[0]
        for life in ("0", "1")
    ]
    lives[0].set("facts", "of the first")
    assert lives[0].clone().check(["facts"])
    assert not lives[1].check(["facts"])


@pytest.mark.parametrize(
    ("unlisted", "known"),
    [
        pytest.param((), True, id="where-nobody-knows-of-another-order"),
        pytest.param((2,), False, id="where-trainers-know-of-one"),
        pytest.param((0,), False, id="where-trainer-0-does"),
    ],
)
def test_endpoints_are_dropped_if_a_launcher_orders_trainers_otherwise(unlisted, known):
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listed = ("a:1", "b:1", "c:1")
    worlds = [
        World(rank, 3, "127.0.0.1", agents.port, () if rank in unlisted else listed, launcher_has_store=True)
        for rank in range(3)
    ]
    found = [shared_world(world, store) for world, store in zip(worlds, met(worlds), strict=True)]
    assert [world.endpoints for world in found] == [listed if known else ()] * 3


def test_a_taken_port_is_reported_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"cannot listen at 127.0.0.1:{port}: .*in use"):
            open_shared_store(World(0, 1, "127.0.0.1", port), Deadlines(deadline_seconds=5.0))


def start(size: int, facts: Callable[[int], Facts]) -> tuple[CountedStore, list[dict[int, Facts]]]:
    """Make simulated trainers join and compare their facts; return those that each one learns."""
    store = CountedStore()
    worlds = [World(rank, size, "127.0.0.1", 1) for rank in range(size)]

    def start_one(world: World) -> dict[int, Facts]:
        join(world, cast("Any", store), JoinWait(60))
        return compare_facts(world, TextExchange(world, cast("Any", store), 60), facts(world.rank))

    with ThreadPoolExecutor(size) as threads:
        return store, list(threads.map(start_one, worlds))


def with_a_gpu(rank: int) -> Facts:
    return Facts("2.15", "2.27", f"GPU-{rank:08}-5a2c-4d11-9f70-2b7c3c4f9a10", "NVIDIA H200")


def test_the_keys_that_512_trainers_read_to_start_are_few():
    store, _ = start(512, lambda _: Facts("2.15"))
    assert store.keys <= 10 * 512


@pytest.mark.parametrize("size", [512, 1024])
def test_the_bytes_to_start_with_gpus_grow_with_the_number_of_trainers(size):
    store, learned = start(size, with_a_gpu)
    assert store.keys <= 10 * size
    assert store.bytes <= 700 * size
    assert all(backend_of(facts) == "cpu:gloo,cuda:nccl" for facts in learned)


def test_missing_trainers_are_summarized_whatever_their_number(monkeypatch):
    monkeypatch.setattr(rendezvous, "ATTEMPT_SECONDS", 0.01)
    store: Any = CountedStore()
    for rank in (0, 1):
        with pytest.raises(DeadlineExceededError, match="and 991 more did not join"):
            join(World(rank, 1000, "127.0.0.1", 1), store, JoinWait(0.05 * (1 - rank)))
    assert len(store.get("who is missing")) < 200


@pytest.fixture
def store() -> Iterator[socket.socket]:
    """Listen as a store would."""
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(10)
        yield listener


@pytest.fixture
def gate(store: socket.socket) -> Iterator[Relay]:
    made = open_gate(store.getsockname()[1], socket.create_server((HOST, 0)), KEY)
    yield made
    made.close()


def test_a_trainer_with_the_key_reaches_the_store(store: socket.socket, gate: Relay):
    tunnel = open_tunnel(HOST, gate.port, KEY)
    with contextlib.closing(tunnel), socket.create_connection((HOST, tunnel.port), 10) as trainer:
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


def test_a_tunnel_waits_for_a_gate_that_opens_later(store: socket.socket):
    with socket.create_server((HOST, 0)) as reserved:
        port = reserved.getsockname()[1]
    tunnel = open_tunnel(HOST, port, KEY, patience_seconds=10)
    with contextlib.closing(tunnel), socket.create_connection((HOST, tunnel.port), 10) as trainer:
        trainer.sendall(b"asked")
        gate = open_gate(store.getsockname()[1], socket.create_server((HOST, port)), KEY)
        with contextlib.closing(gate):
            there, _ = store.accept()
            with there:
                there.settimeout(10)
                assert there.recv(5, socket.MSG_WAITALL) == b"asked"
    assert tunnel.refusal == ""


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
def test_a_stranger_does_not_reach_the_store(
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
    tunnel = open_tunnel(HOST, gate.port, OTHER)
    with contextlib.closing(tunnel), socket.create_connection((HOST, tunnel.port), 10) as trainer:
        assert trainer.recv(1) == b""
    assert "give all trainers the same FLEET_JOB_KEY" in tunnel.refusal


def test_a_tunnel_sends_nothing_to_an_impostor(store: socket.socket):
    tunnel = open_tunnel(HOST, store.getsockname()[1], KEY)
    with contextlib.closing(tunnel), socket.create_connection((HOST, tunnel.port), 10) as trainer:
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
    assert "does not have the key of this job" in tunnel.refusal


def test_unproven_connections_are_limited_and_keep_no_trainer_out(store: socket.socket):
    listener = socket.create_server((HOST, 0))
    gate = open_gate(store.getsockname()[1], listener, KEY, HalfOpen(most=4))
    with contextlib.closing(gate), contextlib.ExitStack() as opened:
        kept = [opened.enter_context(socket.create_connection((HOST, gate.port), 10)) for _ in range(20)]
        tunnel = open_tunnel(HOST, gate.port, KEY)
        opened.callback(tunnel.close)
        trainer = opened.enter_context(socket.create_connection((HOST, tunnel.port), 10))
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
    tunnel = open_tunnel(HOST, gate.port, KEY)
    before = len(named_gate())  # two that accept at least, and perhaps the one that passes on
    with contextlib.closing(tunnel), contextlib.ExitStack() as opened:
        pairs = []
        for _ in range(50):
            trainer = opened.enter_context(socket.create_connection((HOST, tunnel.port), 10))
            pairs.append((trainer, opened.enter_context(store.accept()[0])))
        wait_for(lambda: len(named_gate()) <= before + 1, "the threads that greeted to end")
        for number, (trainer, there) in enumerate(pairs):
            trainer.sendall(bytes([number]))
            there.sendall(bytes([number + 100]))
        for number, (trainer, there) in enumerate(pairs):
            there.settimeout(10)
            assert (there.recv(1), trainer.recv(1)) == (bytes([number]), bytes([number + 100]))


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        pytest.param(
            threading.Thread,
            "fleet-gate",
            "a connection could not be accepted: can't start new thread; trying again",
            id="for-a-connection",
        ),
        pytest.param(
            threading.Timer,
            "Thread-",
            "refused a connection of 127.0.0.1 to the store: can't start new thread",
            id="for-its-time-limit",
        ),
    ],
)
def test_a_gate_survives_a_lack_of_threads(
    gate: Relay,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[threading.Thread],
    name: str,
    words: str,
):
    start, refused = kind.start, list[threading.Thread]()

    def refuses_once(thread: threading.Thread) -> None:
        if thread.name.startswith(name) and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(kind, "start", refuses_once)
    with socket.create_connection((HOST, gate.port), 10) as connected:
        assert connected.recv(1) == b""
    with socket.create_connection((HOST, gate.port), 10) as connected:
        assert len(connected.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
    assert words in caplog.text


def sockets() -> int:
    """Return how many sockets this process has open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(link.readlink()).startswith("socket:")
    return count


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is open")
def test_forked_children_close_ports_and_connections(store: socket.socket, gate: Relay):
    """Workers that outlive a killed trainer would keep its port taken, and its peers waiting."""
    tunnel = open_tunnel(HOST, gate.port, KEY)
    with contextlib.closing(tunnel), socket.create_connection((HOST, tunnel.port), 10) as trainer:
        trainer.sendall(b"asked")
        there, _ = store.accept()
        with there:
            assert there.recv(5, socket.MSG_WAITALL) == b"asked"
            before = sockets()
            if (child := os.fork()) == 0:
                os._exit(before - sockets())
            closed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert closed >= 6, "two ports, and both ends of what the tunnel and the gate pass on"


def named_gate() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fleet-gate"]


def test_a_greeting_has_a_deadline_as_a_whole(store: socket.socket):
    gate = open_gate(store.getsockname()[1], socket.create_server((HOST, 0)), KEY, HalfOpen(seconds=0.2))
    with contextlib.closing(gate), socket.create_connection((HOST, gate.port), 10) as slow:
        assert len(slow.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        assert slow.recv(1) == b""
