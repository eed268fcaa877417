"""What a trainer asks all of its servers before it trains, to find whether they are at one.

Who has completed; which checkpoint is loaded, though each has its own directory, or another trainer loads
just now; at which step, and with which values, training begins.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from fleet.errors import FleetError, StateLostError
from fleet.parameter_server.control.calls import Pending
from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.trainer.calls import ServerCalls
from fleet.parameter_server.waiting import WaitLog
from fleet.plan.config import DistributedMode
from fleet.plan.job import TrainerPlan
from fleet.process import progress

if TYPE_CHECKING:
    from fleet.role_maker import JobIdentity

__all__ = [
    "agree",
    "check_equal",
    "common_save",
    "completed_before",
    "in_step",
    "join",
    "next_step",
    "note_steps_past",
    "warn_of_other_values",
]

_log = logging.getLogger(__name__)
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
        replies = ask_all(lambda control, seconds: control.checkpoints.load("", seconds, save))  # noqa: B023
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


def in_step(plan: TrainerPlan) -> bool:
    """Whether all trainers make the same step."""
    return plan.mode is DistributedMode.SYNC and plan.custom is None


def next_step(plan: TrainerPlan, steps: Sequence[int]) -> int:
    """Return the step that a trainer makes next, of those that the servers say.

    Raises
    ------
    StateLostError
        They lie further apart than servers that are in step.
    """
    holding = [step for server, step in enumerate(steps) if plan.tables or plan.blocks_on(server)]
    if in_step(plan) and max(holding, default=0) - min(holding, default=0) > 1:
        raise StateLostError(
            f"the parameter servers {', '.join(plan.endpoints)} are at the steps "
            f"{', '.join(str(step) for step in steps)}; expected one step, or two that follow each "
            "other: one of them came back without its state"
        )
    return min(holding, default=0)


def completed_before(controls: Sequence[ControlClient], job: "JobIdentity", seconds: float) -> frozenset[int]:
    """Ask the servers, each within so many seconds, and return who has completed, as all of them know.

    Nobody has while one of them cannot be asked: to join says why.
    """
    asked = [control.completed(job.name, job.uid, job.life, seconds) for control in controls]
    try:
        return frozenset.intersection(*(frozenset(each.result().trainers) for each in asked))
    except FleetError:
        return frozenset()


def join(
    controls: Sequence[ControlClient],
    job: "JobIdentity",
    agreement: Mapping[str, str],
    patience: float,
    deadline: float,
) -> list[control_pb2.JoinReply]:
    """Join every server in turn; return their replies.

    Parameters
    ----------
    controls : sequence of ControlClient
        One to each server.
    job : JobIdentity
    agreement : mapping of str to str
        What the servers must have in common with this process.
    patience : float
        How many seconds a sign of life may take.
    deadline : float
        For the last reply, by the monotonic clock.
    """
    replies, log, beats = [], WaitLog(), list[object]()
    for server, control in enumerate(controls):
        progress.waits_for(f"parameter server {control.endpoint} to let it join")
        remaining = max(1.0, deadline - time.monotonic())

        def waiting(server: int = server, endpoint: str = control.endpoint) -> None:
            if log.note(endpoint, lambda: f"waiting to join parameter server {endpoint}"):
                # Else they would give this trainer up; a call that nobody holds is cancelled.
                beats[:] = [each.heartbeat(patience) for each in controls[:server]]

        replies.append(control.join(job.name, job.uid, agreement, remaining, waiting))
    return replies


def warn_of_other_values(
    plan: TrainerPlan, replies: Sequence[control_pb2.JoinReply], checksums: Mapping[int, int]
) -> None:
    """Say in the log that a trainer has begun with other values than the servers, if it has.

    Parameters
    ----------
    plan : TrainerPlan
        Of the servers' blocks.
    replies : sequence of JoinReply
    checksums : mapping of int to int
        CRC-32 of the trainer's own values, by block.
    """
    begun = [reply.placement.parts for reply in replies if reply.step == 0 and not reply.restored]
    differing = {part.block for parts in begun for part in parts if checksums[part.block] != part.checksum}
    blocks = [block for block in plan.blocks if block.id in differing]
    if not blocks:
        return
    names = ", ".join(sorted({block.param for block in blocks})[:3])
    servers = ", ".join(sorted({block.endpoint for block in blocks}))
    _log.warning(
        "trainer %d began with other values than the parameter servers %s: %d of %d blocks differ "
        "(%s …); the servers' values are used. Seed every role alike (torch.manual_seed) before the "
        "model is built, or load the same weights in every role.",
        plan.trainer_id,
        servers,
        len(blocks),
        len(plan.blocks),
        names,
    )


def note_steps_past(trainer: int, calls: ServerCalls) -> None:
    """Say how many steps a trainer that has joined late has made past the others."""
    replies = calls.ask_all(lambda control, seconds: control.ask_steps_past(seconds))
    if past := max(reply.steps_past for reply in replies):
        progress.count("steps_past_the_others", past)
        _log.warning(
            "trainer %d, which joined late, has made %d steps past the others, on its data alone; a loop "
            "over fleet.epochs() or fleet.steps() makes none",
            trainer,
            past,
        )
