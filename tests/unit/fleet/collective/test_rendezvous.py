"""How trainers of a collective job wait for one another to start."""

import contextlib
import gc
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from fleet.collective import rendezvous
from fleet.collective.devices import Facts, backend_of
from fleet.collective.gate import door_to
from fleet.collective.group import Group
from fleet.collective.rendezvous import Place, Wait, as_all_know_it, gather, meet
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError, DeadlineExceededError
from fleet.process.relay import Relay
from tests.support.counted_store import CountedStore

KEY = b"k" * 32
pytestmark = pytest.mark.timeout(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        pytest.param(0, r"trainer 1 did not come within", id="trainer-0-waits-for-the-others"),
        pytest.param(1, r"did not listen at 127.0.0.1:\d+ within", id="the-others-wait-for-trainer-0"),
    ],
)
def test_who_has_never_been_there_is_waited_for_by_a_deadline_of_its_own(rank, said, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "TRY_SECONDS", 0.2)
    place = Place(rank, 2, "127.0.0.1", free_port())
    with pytest.raises(DeadlineExceededError, match=said) as raised:
        meet(place, Deadlines(deadline_seconds=0.1, start_deadline_seconds=1.5))
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
def test_the_store_of_a_run_on_this_machine_listens_on_its_loopback_address_only():
    """torch's own listens on every interface, and knows no key."""
    port = free_port()
    store = meet(Place(0, 1, "127.0.0.1", port), Deadlines(deadline_seconds=5.0))
    assert reaches("127.0.0.1", port)
    assert not reaches("127.0.0.2", port)
    store.set("said", "so")
    assert store.get("said") == b"so"


@pytest.mark.parametrize("host", ["localhost", "192.0.2.1"], ids=["a-name", "an-address-that-others-reach"])
def test_without_a_key_the_store_listens_on_this_machine_only(host, caplog):
    port = free_port()
    store = meet(Place(0, 1, host, port), Deadlines(deadline_seconds=5.0))
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
def test_without_a_key_trainers_of_several_machines_are_told_at_once(rank, hosts, monkeypatch):
    monkeypatch.setattr(rendezvous, "loopback_of", lambda host: None if host == hosts[0] else host)
    endpoints = tuple(f"{host}:6170" for host in hosts for _ in range(2)) if hosts[1] else ()
    place = Place(rank, 4, hosts[0], free_port(), endpoints)
    with pytest.raises(
        ConfigurationError, match=r"192\.0\.2\.9 is another machine.*set FLEET_JOB_KEY"
    ) as raised:
        meet(place, Deadlines(deadline_seconds=30.0))
    assert str(raised.value).startswith("this trainer was given no key of the job")


def test_a_name_that_comes_to_be_another_machines_is_told_once_it_is(monkeypatch):
    monkeypatch.setattr(rendezvous, "TRY_SECONDS", 0.2)
    known = iter([False, True])
    monkeypatch.setattr(rendezvous, "is_elsewhere", lambda _: next(known))
    with pytest.raises(ConfigurationError, match=r"no-such-host\.invalid is another machine"):
        meet(Place(1, 2, "no-such-host.invalid", free_port()), Deadlines(deadline_seconds=30.0))


def met(places: list[Place]) -> list[Store]:
    deadlines = Deadlines(deadline_seconds=20.0)
    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(lambda place: meet(place, deadlines), places))


def test_with_a_key_trainers_meet_at_a_store_behind_a_gate():
    port = free_port()
    first, second = met([Place(rank, 2, "127.0.0.1", port, key=KEY) for rank in range(2)])
    second.set("said", "so")
    assert first.get("said") == second.clone().get("said") == b"so"
    stranger = timedelta(seconds=1)
    with pytest.raises((DistError, RuntimeError)):
        TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=stranger).get("said")


def test_a_gate_closes_with_its_store():
    port = free_port()
    store = meet(Place(0, 1, "127.0.0.1", port, key=KEY), Deadlines(deadline_seconds=5.0))
    assert reaches("127.0.0.1", port)
    del store
    gc.collect()
    assert not reaches("127.0.0.1", port)


def test_a_trainer_with_another_key_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr(rendezvous, "TRY_SECONDS", 0.2)
    doors = []

    def noted(*of: Any) -> Relay:
        doors.append(door_to(*of))
        return doors[-1]

    monkeypatch.setattr(rendezvous, "door_to", noted)
    port = free_port()
    others = Place(1, 2, "127.0.0.1", port, key=b"o" * 32)
    deadlines = Deadlines(deadline_seconds=0.1, start_deadline_seconds=1.5)
    with ThreadPoolExecutor(2) as threads:
        alone = threads.submit(meet, Place(0, 2, "127.0.0.1", port, key=KEY), deadlines)
        with pytest.raises(DeadlineExceededError, match="the same FLEET_JOB_KEY"):
            meet(others, deadlines)
        with pytest.raises(DeadlineExceededError, match="trainer 1 did not come"):
            alone.result()
    (door,) = doors
    assert not reaches("127.0.0.1", door.port), "it is closed where nobody goes through it any more"


def test_what_a_life_before_has_left_in_the_store_of_a_launcher_is_not_seen():
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lives = [
        met([Place(0, 1, "127.0.0.1", agents.port, launcher_has_store=True, launcher_restarts=life)])[0]
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
def test_a_launcher_that_orders_trainers_itself_leaves_none_with_anothers_endpoint(unlisted, known):
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listed = ("a:1", "b:1", "c:1")
    places = [
        Place(rank, 3, "127.0.0.1", agents.port, () if rank in unlisted else listed, launcher_has_store=True)
        for rank in range(3)
    ]
    found = [as_all_know_it(place, store) for place, store in zip(places, met(places), strict=True)]
    assert [place.endpoints for place in found] == [listed if known else ()] * 3


def test_a_port_that_is_taken_is_told_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"cannot listen at 127.0.0.1:{port}: .*in use"):
            meet(Place(0, 1, "127.0.0.1", port), Deadlines(deadline_seconds=5.0))


class Watched:
    """Stands in for a watch."""

    def waiting(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def start(size: int, facts: Callable[[int], Facts]) -> tuple[CountedStore, list[Group]]:
    """Have simulated trainers meet, and compare what they have."""
    store = CountedStore()
    places = [Place(rank, size, "127.0.0.1", 1) for rank in range(size)]

    def start_one(place: Place) -> Group:
        gather(place, cast("Any", store), Wait(60))
        group = Group(place, Deadlines(), cast("Any", store), cast("Any", Watched()))
        group._compare(facts(place.rank))
        return group

    with ThreadPoolExecutor(size) as threads:
        return store, list(threads.map(start_one, places))


def with_a_gpu(rank: int) -> Facts:
    return Facts("2.15", "2.27", f"GPU-{rank:08}-5a2c-4d11-9f70-2b7c3c4f9a10", "NVIDIA H200")


def test_what_512_trainers_ask_the_store_grows_with_their_number_and_not_with_its_square():
    store, _ = start(512, lambda _: Facts("2.15"))
    assert store.keys <= 10 * 512


@pytest.mark.parametrize("size", [512, 1024])
def test_the_bytes_by_which_trainers_with_a_gpu_each_start_grow_with_their_number(size):
    store, groups = start(size, with_a_gpu)
    assert store.keys <= 10 * size
    assert store.bytes <= 700 * size
    assert all(backend_of(group._everybodys) == "cpu:gloo,cuda:nccl" for group in groups)


def test_trainers_that_are_missing_are_told_in_a_word_of_any_number(monkeypatch):
    monkeypatch.setattr(rendezvous, "TRY_SECONDS", 0.01)
    store: Any = CountedStore()
    for rank in (0, 1):
        with pytest.raises(DeadlineExceededError, match="and 991 more did not come"):
            gather(Place(rank, 1000, "127.0.0.1", 1), store, Wait(0.05 * (1 - rank)))
    assert len(store.get("who is missing")) < 200
