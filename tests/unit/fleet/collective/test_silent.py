"""One trainer looks who is silent for all that ask."""

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fleet.collective.rendezvous import Place
from fleet.collective.silent import Silent
from tests.support.beating_trainers import HEARTBEAT, BeatingTrainers


def silent(trainers: BeatingTrainers, rank: int, pause: Callable[[float], object]) -> list[int]:
    """Return what a trainer is told."""
    place = Place(rank, len(trainers.boards), "127.0.0.1", 1)
    return Silent(trainers.boards[rank], place, HEARTBEAT, pause).now()


def ask_while_another_looks(
    trainers: BeatingTrainers, alive: Collection[int], then: Collection[int]
) -> list[Any]:
    """Have trainer 2 ask who is silent while trainer 1 looks for that; return what both are told.

    Those in `alive` beat while trainer 1 looks, and those in `then` while trainer 2 does, if it does.
    """
    asked, answered = threading.Event(), threading.Event()

    def pause_of_second(_: float) -> None:
        if not asked.is_set():
            asked.set()
            assert answered.wait(10)
        else:
            trainers.beat([], then)

    with ThreadPoolExecutor(1) as threads:
        second = None

        def pause_of_first(_: float) -> None:
            nonlocal second
            second = threads.submit(silent, trainers, 2, pause_of_second)
            assert asked.wait(10)
            trainers.beat([], alive)

        told = silent(trainers, 1, pause_of_first)
        answered.set()
        assert second is not None
        return [told, second.result()]


def test_one_looks_for_all_that_ask_who_is_silent():
    trainers = BeatingTrainers(4)
    assert ask_while_another_looks(trainers, alive=[0, 1, 2], then=[]) == [[3], [3]]
    assert len(trainers.store.reads) == 2


@pytest.mark.parametrize(
    ("alive", "first"),
    [
        pytest.param(range(4), [], id="nobody-was-silent-before-it-asked"),
        pytest.param([0, 1, 3], [2], id="it-was-frozen-itself"),
    ],
)
def test_who_learns_nothing_from_anothers_look_has_one_that_begins_after_it_asked(alive, first):
    assert ask_while_another_looks(BeatingTrainers(4), alive, then=[0, 1, 2]) == [first, [3]]


def test_who_asks_later_is_told_of_another_look():
    trainers = BeatingTrainers(3)
    assert silent(trainers, 1, lambda _: trainers.beat([], [0, 1])) == [2]
    assert silent(trainers, 0, lambda _: trainers.beat([], [0, 1, 2])) == []


def test_who_asks_another_that_dies_before_it_answers_looks_itself():
    trainers = BeatingTrainers(4)
    with pytest.raises(InterruptedError):
        silent(trainers, 1, killed)
    assert silent(trainers, 2, lambda _: trainers.beat([], [0, 2])) == [1, 3]


def killed(_: float) -> None:
    raise InterruptedError
