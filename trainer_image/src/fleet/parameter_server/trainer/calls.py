"""The control calls that a trainer makes to its servers while it trains."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from fleet.errors import DeadlineExceededError
from fleet.parameter_server.control.calls import Pending, pieces_of
from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.trainer.waits import LOOK_SECONDS, Waits
from fleet.parameter_server.waiting import WaitLog

if TYPE_CHECKING:
    from fleet.parameter_server.control.proto import control_pb2

__all__ = ["ServerCalls"]

Reply = TypeVar("Reply")


class ServerCalls:
    """Calls to one server or to all of them; each ends with the failure of the session.

    Parameters
    ----------
    waits : Waits
    """

    def __init__(self, waits: Waits) -> None:
        self.controls: list[ControlClient] = []
        """The control channels in the servers' order, once they are opened."""
        self._waits = waits

    @property
    def first(self) -> ControlClient:
        """The first server's channel."""
        return self.controls[0]

    def ask_all(self, ask: Callable[[ControlClient, float], Pending[Reply]]) -> list[Reply]:
        """Ask every server at once; return their replies in the servers' order.

        Parameters
        ----------
        ask : callable
            Gets the server's control channel, and how many seconds the reply may take: writing and reading
            a shard may take as long as any other delay of a peer that is alive.
        """
        self._waits.check()
        seconds = self._waits.settings.stalled_seconds
        pending = [(control, ask(control, seconds)) for control in self.controls]
        log = WaitLog()
        return [self._await(control, reply, log) for control, reply in pending]

    def ask(self, server: int, ask: Callable[[ControlClient, float], Pending[Reply]]) -> Reply:
        """Ask one server, as `ask_all` does all of them."""
        self._waits.check()
        control = self.controls[server]
        return self._await(control, ask(control, self._waits.settings.stalled_seconds), WaitLog())

    def ask_until(
        self,
        server: int,
        ask: Callable[[ControlClient, float], Pending[Reply]],
        done: Callable[[Reply], bool],
        what: str,
    ) -> Reply:
        """Ask one server again and again, until its reply says that something is done.

        Parameters
        ----------
        server : int
        ask : callable
            As of `ask_all`; the server itself waits a little before it replies that it is not.
        done : callable
            Whether a reply says so.
        what : str
            What the server is to do, for messages.

        Raises
        ------
        DeadlineExceededError
            It has not done it for longer than any delay of a peer that is alive may take.
        """
        log, endpoint = WaitLog(), self.controls[server].endpoint
        while not done(reply := self.ask(server, ask)):
            waited = log.note(server, lambda: f"waiting for parameter server {endpoint} to {what}")
            if waited >= self._waits.settings.stalled_seconds:
                raise DeadlineExceededError(
                    f"parameter server {endpoint} answers, and has not done within {waited:.0f} s what it was"
                    f" asked to: to {what}; look at its disk"
                )
        return reply

    def optimizer_state(self) -> "Iterator[control_pb2.StatePiece]":
        """Iterate over the optimizer state of all servers."""
        return self._pieces(values=False)

    def values(self) -> "Iterator[control_pb2.StatePiece]":
        """Iterate over the values that the servers hold."""
        return self._pieces(values=True)

    def close(self) -> None:
        """Close the channels."""
        for control in self.controls:
            control.close()
        self.controls = []

    def _pieces(self, *, values: bool) -> "Iterator[control_pb2.StatePiece]":
        check = self._waits.check
        check()  # after the end there is nobody to ask, which is not the same as nothing to tell
        for control in self.controls:
            check()  # a closed channel takes no call
            yield from pieces_of(control.state(values=values), check, self._waits.settings.stalled_seconds)

    def _await(self, control: ControlClient, reply: Pending[Reply], log: WaitLog) -> Reply:
        while not reply.arrives_within(LOOK_SECONDS):
            self._waits.check()
            log.note(control, lambda: f"waiting for parameter server {control.endpoint}")
        return reply.result()
