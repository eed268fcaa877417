"""Who is silent at this moment, asked by all trainers at once whose connections have failed.

Two looks at everybody's heartbeats tell it. One trainer looks for all that ask meanwhile, so that all
together ask for as many keys as there are trainers, and not for its square.
"""

import json
from collections.abc import Callable

from fleet.collective.board import Board
from fleet.collective.rendezvous import Place

__all__ = ["Silent"]

TRIES = 8
"""How often an answer is looked for, a quarter of a heartbeat apart."""
_ASKED = "who looks for the silent"


class Silent:
    """One trainer's question.

    Parameters
    ----------
    board : Board
    place : Place
    heartbeat_seconds : float
    pause : callable
        Waits for some seconds.
    """

    def __init__(
        self, board: Board, place: Place, heartbeat_seconds: float, pause: Callable[[float], object]
    ) -> None:
        self._board = board
        self._place = place
        self._heartbeat_seconds = heartbeat_seconds
        self._pause = pause
        self._asked = 0

    def now(self) -> list[int]:
        """Return who misses at least one heartbeat."""
        began_before = True
        while True:
            self._asked += 1
            ours = f"{self._place.rank} {self._asked}"
            looks = self._board.exchange(_ASKED, "", ours)
            if looks == ours:
                return self._look_twice(ours)
            answer = self._answer_of(looks)
            if answer or (answer is not None and not began_before):
                return answer
            self._board.exchange(_ASKED, looks, "")  # it may have ended before it could answer
            began_before = False

    def _look_twice(self, ours: str) -> list[int]:
        before = self._board.beats(self._place.others)
        self._pause(1.5 * self._heartbeat_seconds)
        after = self._board.beats(self._place.others)
        silent = [rank for rank in self._place.others if before[rank].number == after[rank].number]
        self._board.tell(_answer(ours), json.dumps(silent))
        self._board.exchange(_ASKED, ours, "")  # whoever asks from now on wants another look
        return silent

    def _answer_of(self, looks: str) -> list[int] | None:
        """Return whom another trainer has found silent, but for this one; None if it does not answer."""
        self._pause(1.5 * self._heartbeat_seconds)
        for _ in range(TRIES):
            if (answer := self._board.told(_answer(looks))) is not None:
                return [rank for rank in json.loads(answer) if rank != self._place.rank]
            self._pause(self._heartbeat_seconds / 4)
        return None


def _answer(looks: str) -> str:
    return f"{_ASKED}: {looks}"
