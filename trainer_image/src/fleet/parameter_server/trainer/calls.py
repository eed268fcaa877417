"""A trainer's control calls to one or all servers, including barriers and reductions."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fleet.errors import DeadlineExceededError
from fleet.parameter_server.control.calls import Pending, pieces_of
from fleet.parameter_server.control.checkpoints import join_states
from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.control.reduction import Contribution
from fleet.parameter_server.trainer.replies import LOOK_SECONDS, Replies
from fleet.parameter_server.waits import WaitLog, name_trainers

if TYPE_CHECKING:
    from fleet.parameter_server.control.proto import control_pb2

__all__ = ["ServerCalls"]

Reply = TypeVar("Reply")


class ServerCalls:
    """A trainer's control calls to its servers. Each call raises the session's error, if there is one.

    Parameters
    ----------
    controls : sequence of ControlClient
        The control channel of each server.
    replies : Replies
        The session's replies, which record failures.
    """

    def __init__(self, controls: Sequence[ControlClient], replies: Replies) -> None:
        self.controls = controls
        self._check = replies.check
        self._settings = replies.settings
        self._plan = replies.plan
        self._barriers_passed = 0
        self._reductions_passed = 0

    def ask_all(self, ask: Callable[[ControlClient, float], Pending[Reply]]) -> list[Reply]:
        """Call all servers concurrently; return the replies in server order.

        Parameters
        ----------
        ask : callable
            Starts a call, given the server's control channel and the time limit in seconds. The limit is the
            general limit for a live peer, because reading or writing a shard may take long.
        """
        self._check()
        seconds = self._settings.stalled_seconds
        pending = [(control, ask(control, seconds)) for control in self.controls]
        log = WaitLog()
        return [self._result(control, reply, log) for control, reply in pending]

    def ask(self, server: int, ask: Callable[[ControlClient, float], Pending[Reply]]) -> Reply:
        """Call one server and return its reply; `ask` starts the call, as in `ask_all`."""
        self._check()
        control = self.controls[server]
        return self._result(control, ask(control, self._settings.stalled_seconds), WaitLog())

    def ask_until(
        self,
        server: int,
        ask: Callable[[ControlClient, float], Pending[Reply]],
        done: Callable[[Reply], bool],
        what: str,
    ) -> Reply:
        """Call a server repeatedly until it replies that a task is complete; return that reply.

        Parameters
        ----------
        server : int
        ask : callable
            See `ask_all`. The server waits briefly before replying that the task is not done.
        done : callable
            Returns whether a reply means that the task is done.
        what : str
            The task of the server, for messages.

        Raises
        ------
        DeadlineExceededError
            The server has taken longer than a live peer may.
        """
        log, endpoint = WaitLog(), self.controls[server].endpoint
        while not done(reply := self.ask(server, ask)):
            waited = log.note(server, lambda: f"waiting for parameter server {endpoint} to {what}")
            if waited >= self._settings.stalled_seconds:
                raise DeadlineExceededError(
                    f"parameter server {endpoint} answers calls, but took longer than {waited:.0f} s to "
                    f"{what}; check its disk"
                )
        return reply

    def barrier(self) -> None:
        """Wait until every trainer that has not completed has called this method."""
        self._pass("a barrier", ending=False)
        self._barriers_passed += 1

    def wait_for_ends(self) -> None:
        """Wait until every other trainer has called this method, has completed, or has been lost."""
        self._pass("the end of training", ending=True)

    def reduce(self, given: Contribution, call: str = "all_reduce_worker") -> bytes:
        """Reduce numbers over all trainers that have not completed; return the result.

        Parameters
        ----------
        given : Contribution
        call : str
            The name of the script's call, for messages.

        Raises
        ------
        ConfigurationError
            Another trainer's contribution has a different form.
        DeadlineExceededError
            A trainer did not call this method; the message names the trainer.
        """
        self._check()
        log = WaitLog()
        # There is no pause between two calls, because the server waits for up to a second before it replies.
        while True:
            reply = self.controls[0].reduce(self._reductions_passed, given, self._settings.deadline_seconds)
            if reply.done:
                break
            self._wait_for(log, f"{call} ({given.form})", reply.missing_trainers)
        self._reductions_passed += 1
        return reply.data

    def values(self) -> "Iterator[control_pb2.StatePiece]":
        """Yield messages that contain the values of all blocks on the servers."""
        return self._state(values=True)

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Fetch the optimizer state from the servers.

        Returns
        -------
        dict
            For each parameter, its entries in torch.optim's state. Entries with the shapes of the blocks are
            joined to the parameter's shape. For any other entry, such as a step count, the first block's
            entry is returned.
        """
        states = join_states(self._state(values=False))
        joined: dict[str, dict[str, Any]] = {}
        for name in dict.fromkeys(block.param for block in self._plan.blocks):
            blocks = self._plan.blocks_of(name)
            for entry, first in states[blocks[0].id].items():
                value = first
                if blocks[0].param_shape and isinstance(first, Tensor) and first.shape == blocks[0].shape:
                    parts = [states[block.id][entry].view(-1) for block in blocks]
                    value = torch.cat(parts).view(blocks[0].param_shape)
                joined.setdefault(name, {})[entry] = value
        return joined

    def close(self) -> None:
        """Close the control channels."""
        for control in self.controls:
            control.close()
        self.controls = ()

    def _state(self, *, values: bool) -> "Iterator[control_pb2.StatePiece]":
        self._check()  # an ended session has no channels, which must not be mistaken for no state
        for control in self.controls:
            self._check()  # otherwise a closed channel would refuse the call
            yield from pieces_of(control.state(values=values), self._check, self._settings.stalled_seconds)

    def _result(self, control: ControlClient, reply: Pending[Reply], log: WaitLog) -> Reply:
        while not reply.arrives_within(LOOK_SECONDS):
            self._check()
            log.note(control, lambda: f"waiting for parameter server {control.endpoint}")
        return reply.result()

    def _pass(self, what: str, *, ending: bool) -> None:
        self._check()
        log = WaitLog()
        while True:
            reply = self.controls[0].barrier(
                self._barriers_passed, self._settings.deadline_seconds, ending=ending
            )
            if reply.passed:
                break
            self._wait_for(log, what, reply.missing_trainers)

    def _wait_for(self, log: WaitLog, what: str, trainers: Sequence[int]) -> None:
        """Log which trainers a call waits for; raise DeadlineExceededError if it waits too long."""
        missing = name_trainers(trainers)
        waited = log.note(what, lambda: f"{what} waits for {missing}")
        if waited >= self._settings.stalled_seconds:
            raise DeadlineExceededError(f"{what} waited {waited:.0f} s for {missing}")
        self._check()
