"""Tests take turns: beside each other, and serial ones alone."""

import fcntl
import threading
from pathlib import Path

import pytest

from tests.support.processes import wait_for
from tests.support.turns import Turns

SECONDS = 10


class Test:
    """A test in a process of its own, as far as locks can tell; it runs until it is let go."""

    __test__ = False

    def __init__(self, folder: Path, *, serial: bool, next_is_serial: bool = False) -> None:
        self._turns = Turns(folder)
        self._end = threading.Event()
        self.runs = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(serial, next_is_serial), daemon=True)
        self._thread.start()

    def _run(self, serial: bool, next_is_serial: bool) -> None:
        with self._turns.turn(serial=serial, next_is_serial=next_is_serial):
            self.runs.set()
            self._end.wait(SECONDS)

    def ends(self) -> None:
        self._end.set()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


def stands_in_the_door(folder: Path) -> bool:
    """Whether somebody waits to be alone."""
    with (folder / "door").open("w") as door:
        try:
            fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_serial_test_runs_alone_and_before_those_that_came_later(tmp_path: Path):
    first, beside = Test(tmp_path, serial=False), Test(tmp_path, serial=False)
    assert first.runs.wait(SECONDS)
    assert beside.runs.wait(SECONDS)
    alone = Test(tmp_path, serial=True)
    wait_for(lambda: stands_in_the_door(tmp_path), "the serial test to wait")
    first.ends()
    assert not alone.runs.wait(0.1)
    later = Test(tmp_path, serial=False)
    beside.ends()
    assert alone.runs.wait(SECONDS)
    assert not later.runs.wait(0.1)
    alone.ends()
    assert later.runs.wait(SECONDS)
    later.ends()


@pytest.mark.parametrize("next_is_serial", [True, False])
def test_a_process_keeps_its_turn_from_one_serial_test_to_the_next(tmp_path: Path, next_is_serial: bool):
    serial = Test(tmp_path, serial=True, next_is_serial=next_is_serial)
    serial.ends()
    other = Test(tmp_path, serial=False)
    assert other.runs.wait(0.1 if next_is_serial else SECONDS) is not next_is_serial
