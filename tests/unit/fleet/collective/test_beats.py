"""One trainer looks at heartbeats for all that wait; who it is may change at any time."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from fleet.collective.beats import Beats
from fleet.collective.heartbeats import Digest, Missed
from fleet.collective.rendezvous import Place
from fleet.collective.silent import Silent
from tests.support.beating_trainers import WAITING, BeatingTrainers
from tests.support.counted_store import CountedStore


def missed_by(found: dict[int, Digest]) -> dict[int, dict[int, float]]:
    """Return whom each misses, and for how many seconds."""
    return {rank: {each.rank: each.seconds for each in digest.missed} for rank, digest in found.items()}


def test_one_looks_at_heartbeats_and_the_others_read_what_it_has_found():
    trainers = BeatingTrainers(4)
    found = trainers.beat(range(4), times=5)
    assert len(trainers.store.reads) == 5
    assert {digest.looker for digest in found.values()} == {0}
    assert all(digest.number == 5 for digest in found.values())


@pytest.mark.parametrize(
    "waiting", [[0], [3], [1, 2, 3]], ids=["only-trainer-0", "only-the-last", "all-but-0"]
)
def test_whoever_waits_knows_of_the_others_whatever_these_do(waiting):
    trainers = BeatingTrainers(4)
    computing = set(range(4)) - set(waiting)
    found = trainers.beat(waiting, computing, times=4)
    for digest in found.values():
        assert {each.standing.what: each.alive for each in digest.places} == {
            WAITING.what: len(waiting),
            "": len(computing),
        }


def test_a_trainer_alone_knows_itself():
    assert BeatingTrainers(1).beat([0], times=3)[0].places[0].ranks == [0]


def test_another_looks_at_its_next_heartbeat_when_one_waits_no_longer_and_misses_whom_that_one_missed():
    trainers = BeatingTrainers(4)
    trainers.beat(range(3), times=8)
    found = trainers.beat([1, 2], computing=[0])
    assert {digest.looker for digest in found.values()} == {1}
    assert missed_by(found) == {1: {3: 7.0}, 2: {3: 7.0}}
    trainers.beat([], computing=[0, 1, 2], times=3)
    assert not any(missed_by(trainers.beat(range(4), times=2)).values()), "it came back"


@pytest.mark.parametrize("killed", range(4))
def test_each_trainer_is_missed_since_the_others_saw_its_last_heartbeat_as_if_each_looked(killed):
    trainers = BeatingTrainers(4)
    trainers.beat(range(4), times=3)
    found = trainers.beat(set(range(4)) - {killed}, times=10)
    for of_one in missed_by(found).values():
        ((rank, seconds),) = of_one.items()
        assert rank == killed
        assert seconds >= 9.0


def test_whoever_dies_with_the_one_that_looks_is_missed_soon_after():
    trainers = BeatingTrainers(4)
    trainers.beat(range(4), times=3)
    for of_one in missed_by(trainers.beat([2, 3], times=10)).values():
        assert of_one.keys() == {0, 1}
        assert min(of_one.values()) >= 6.0


def test_one_that_was_frozen_while_it_looked_reads_what_another_has_found_since():
    trainers = BeatingTrainers(3)
    trainers.beat(range(3), times=3)
    trainers.beat([1, 2], times=10)
    found = trainers.beat(range(3))
    assert {digest.looker for digest in found.values()} == {1}
    found = trainers.beat(range(3))
    assert missed_by(found) == {0: {}, 1: {}, 2: {}}


def test_seconds_go_on_after_what_was_found_last():
    trainers = BeatingTrainers(3)
    trainers.beat([0, 1], times=8)
    assert missed_by(trainers.beat([1])) == {1: {2: 8.0}}


def test_of_those_that_are_missed_each_is_asked_for_before_it_is_given_up():
    trainers = BeatingTrainers(3)
    trainers.beat(range(3))
    missed = [Missed(1, 1, 200.0), Missed(2, 1, 200.0)]
    assert trainers.beats[0].unchanged(missed) == missed
    trainers.beat([2])
    assert trainers.beats[0].unchanged(missed) == missed[:1]


def torchs_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("store", [CountedStore, HashStore, torchs_store])
def test_torchs_stores_serve_as_the_simulated_one_does(store):
    trainers = BeatingTrainers(3, store())
    trainers.beat(range(3), times=3)
    assert missed_by(trainers.beat([1, 2], times=4)) == {1: {0: 4.0}, 2: {0: 4.0}}
    for _ in range(2):
        asking = Silent(
            trainers.boards[1], Place(1, 3, "127.0.0.1", 1), 1.0, lambda _: trainers.beat([], [1])
        )
        assert asking.now() == [0, 2]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(Beats.all_are_stuck, trainers.beats)) == [None] * 3
