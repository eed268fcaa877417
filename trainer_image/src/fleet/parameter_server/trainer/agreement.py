"""One checkpoint for all servers, though each has its own directory, or another trainer loads just now."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from fleet.errors import StateLostError
from fleet.parameter_server.control.client import ControlClient, Pending
from fleet.parameter_server.control.proto import control_pb2

__all__ = ["agree", "check_equal", "common_save"]

_PAUSE_SECONDS: Final = 0.2
Loads = Callable[
    [Callable[[ControlClient, float], Pending[control_pb2.LoadReply]]], list[control_pb2.LoadReply]
]


def agree(ask_all: Loads, endpoints: Sequence[str], deadline_seconds: float) -> list[control_pb2.LoadReply]:
    """Have the servers load one checkpoint: the newest that all have whole.

    Another trainer may be about to do the same, or have asked for one that a server still loads.

    Parameters
    ----------
    ask_all : callable
        Asks every server at once.
    endpoints : sequence of str
        Theirs, for messages.
    deadline_seconds : float

    Raises
    ------
    StateLostError
        They have different ones in the end.
    """
    deadline, save = time.monotonic() + deadline_seconds, ""
    while True:
        replies = ask_all(lambda control, seconds: control.load("", seconds, save))  # noqa: B023
        restored = [reply.restored for reply in replies]
        if len(set(restored)) == 1:
            return replies
        if time.monotonic() >= deadline:
            check_equal(endpoints, restored)
        save = common_save(replies)
        time.sleep(_PAUSE_SECONDS)


def common_save(replies: Sequence[control_pb2.LoadReply]) -> str:
    """Return the newest checkpoint that all servers have whole, by its random name; empty for none."""
    return next((save for save in replies[0].saves if all(save in reply.saves for reply in replies)), "")


def check_equal(endpoints: Sequence[str], restored: Sequence[str]) -> None:
    """Check that the servers have loaded one checkpoint.

    Raises
    ------
    StateLostError
        They have not; the message says which has loaded what.
    """
    if len(set(restored)) > 1:
        found = ", ".join(
            f"{endpoint} {f'the save {save}' if save else 'nothing'}"
            for endpoint, save in zip(endpoints, restored, strict=True)
        )
        raise StateLostError(
            f"the parameter servers have loaded different checkpoints: {found}; expected one that every "
            "server has whole"
        )
