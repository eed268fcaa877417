"""What a trainer does with a store that does not answer: one that was stopped minds no time limit either."""

import threading
from typing import Any

import pytest
from torch.distributed import DistStoreError

from fleet.collective import board as board_module
from fleet.collective.rendezvous import Place
from fleet.collective.watchdog import Watch
from fleet.environment.deadlines import Deadlines


class Stopped:
    """Takes what it is told, and does not answer."""

    def __init__(self) -> None:
        self.asked, self.ended = threading.Event(), threading.Event()

    def compare_set(self, *_: str) -> bytes:
        self.asked.set()
        self.ended.wait(20)
        return b""


def test_a_thread_does_not_wait_for_ever_for_the_call_of_another(monkeypatch):
    monkeypatch.setattr(board_module, "STORE_SECONDS", 0.1)
    store: Any = Stopped()
    watch = Watch(store, Place(1, 2, "localhost", 1), Deadlines(), lambda _: None)
    board = watch._beats._board
    first = threading.Thread(target=board.exchange, args=("key", "", "text"))
    first.start()
    assert store.asked.wait(10)
    with pytest.raises(DistStoreError, match="had no answer for 0 s"):
        board.tell("key", "text")
    assert watch.silent_now() == [0]
    store.ended.set()
    first.join()
