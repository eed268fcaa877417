"""How a server lets its trainers go: each hears the last word that is for it, also one that comes back."""

import contextlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from fleet.errors import FleetError
from fleet.parameter_server.server.serving import Serving
from fleet.parameter_server.server.trainer_session import TrainerSession
from fleet.parameter_server.server.trainers import Trainers
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.waiting import wait_for_all

__all__ = ["Farewell"]

_FLUSH_SECONDS: Final = 10.0


class Farewell:
    """The end of one server's sessions.

    Parameters
    ----------
    trainers : Trainers
    serving : Serving
        Guards their membership.
    settings : Settings
    """

    def __init__(self, trainers: Trainers, serving: Serving, settings: Settings) -> None:
        self._trainers = trainers
        self._serving = serving
        self._settings = settings

    def wait_for_goodbyes(self) -> None:
        """Stay for trainers whose connection broke before they could learn that they may go."""
        sessions = list(self._trainers.sessions.values())
        wait_for_all((session.ending.left for session in sessions), self._settings.silent_seconds)

    def tell(self, error: FleetError | None) -> None:
        """Send each trainer its last word: why the server ends, where it has failed and the trainer lives."""

        def part(session: TrainerSession) -> None:
            with contextlib.suppress(OSError):
                if error is not None and session.identity.trainer in self._trainers.membership.live:
                    session.fail(error, 1.0)
                else:
                    session.finish(_FLUSH_SECONDS)

        sessions = list(self._trainers.sessions.values())
        with ThreadPoolExecutor(max(1, len(sessions)), thread_name_prefix="fleet-farewell") as at_once:
            list(at_once.map(part, sessions))  # one that does not read delays no other's last word

    def wait_until_told(self, vanished: Callable[[], Collection[int]]) -> None:
        """Stay for trainers that have no connection just now, and come back to hear why the server ends.

        Whoever lives learns from a beat or two that there is a server to come back to; who has vanished is
        not waited for.
        """
        with self._serving.changed:
            awaited = set(self._trainers.membership.live).difference(vanished())
        sessions = [each for trainer, each in list(self._trainers.sessions.items()) if trainer in awaited]
        wait_for_all(
            (session.ending.told for session in sessions), 2 * self._settings.heartbeat_seconds + 1.0
        )
