"""Agreement between a trainer and all servers before training: joining, the checkpoint to load, and the step.

The agreement covers the trainers that have completed, the loaded checkpoint, and the step and values with
which training begins. The servers agree on one checkpoint even if each server has its own directory, or if
another trainer loads a checkpoint at the same time.
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
from fleet.parameter_server.waits import WaitLog
from fleet.plan.job import TrainerPlan
from fleet.process import progress

if TYPE_CHECKING:
    from fleet.role_maker import JobIdentity

__all__ = [
    "agree",
    "check_equal",
    "common_save",
    "completed_before",
    "join",
    "loaded_and_steps",
    "next_step",
    "note_steps_past",
    "warn_of_other_values",
]

_log = logging.getLogger(__name__)
_PAUSE_SECONDS: Final = 0.2
Loads = Callable[
    [Callable[[ControlClient, float], Pending[control_pb2.LoadReply]]], list[control_pb2.LoadReply]
]


def completed_before(controls: Sequence[ControlClient], job: "JobIdentity", seconds: float) -> frozenset[int]:
    """Return the trainers that have completed, according to all servers.

    The result is empty if a server does not answer: the later attempt to join that server reports the reason.
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
    """Join the servers one after another; return their replies.

    Parameters
    ----------
    controls : sequence of ControlClient
        The control channel of each server.
    job : JobIdentity
    agreement : mapping of str to str
        The facts on which the servers must agree with this process.
    patience : float
        The time limit of a heartbeat, in seconds.
    deadline : float
        The deadline for the last reply, by the monotonic clock.
    """
    replies, log, beats = [], WaitLog(), list[object]()
    for server, control in enumerate(controls):
        progress.waits_for(f"parameter server {control.endpoint} to let it join")
        remaining = max(1.0, deadline - time.monotonic())

        def waiting(server: int = server, endpoint: str = control.endpoint) -> None:
            if log.note(endpoint, lambda: f"waiting to join parameter server {endpoint}"):
                # Otherwise servers joined earlier would treat this trainer as lost. The list keeps references
                # to the calls, because gRPC cancels a call that is not referenced.
                beats[:] = [each.heartbeat(patience) for each in controls[:server]]

        replies.append(control.join(job.name, job.uid, agreement, remaining, waiting))
    return replies


def warn_of_other_values(
    plan: TrainerPlan, replies: Sequence[control_pb2.JoinReply], checksums: Mapping[int, int]
) -> None:
    """Log a warning if the trainer's initial values differ from the servers' values.

    Parameters
    ----------
    plan : TrainerPlan
        The plan that assigns the blocks to the servers.
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
        "the initial values of trainer %d differ from those of the parameter servers %s in %d of %d blocks "
        "(%s …); the servers' values are used. Set the same seed in every role (torch.manual_seed) before "
        "the model is built, or load the same weights in every role",
        plan.trainer_id,
        servers,
        len(blocks),
        len(plan.blocks),
        names,
    )


def loaded_and_steps(
    plan: TrainerPlan, joined: Sequence[control_pb2.JoinReply], calls: ServerCalls, deadline_seconds: float
) -> tuple[list[str], list[int]]:
    """Return the checkpoint that each server has loaded, and the step of each server.

    In modes with a common step, the servers are asked only after this trainer has joined all of them: from
    then on, each server keeps the values before its last step for this trainer. If another trainer makes the
    servers load a checkpoint at the same time, some servers may have loaded it already.
    """
    found: Sequence[control_pb2.JoinReply | control_pb2.StatsReply | control_pb2.LoadReply] = joined
    # Not from the replies to the joins: between two joins, the other trainers may have completed a step.
    if plan.has_common_step:
        now = calls.ask_all(lambda control, seconds: control.stats(seconds))
        found = now
    if len({reply.restored for reply in (*joined, *found)}) > 1:
        loaded = agree(calls.ask_all, plan.endpoints, deadline_seconds)
        found = loaded
    return [reply.restored for reply in found], [reply.step for reply in found]


def agree(ask_all: Loads, endpoints: Sequence[str], deadline_seconds: float) -> list[control_pb2.LoadReply]:
    """Make the servers load the newest checkpoint that is complete on all of them.

    Another trainer may be doing the same, or may have requested a checkpoint that a server is still loading.

    Parameters
    ----------
    ask_all : callable
        Calls all servers concurrently.
    endpoints : sequence of str
        The endpoints of the servers, for messages.
    deadline_seconds : float

    Raises
    ------
    StateLostError
        The servers still have different checkpoints at the deadline.
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
    """Return the name of the newest checkpoint that is complete on all servers, or an empty string."""
    return next((save for save in replies[0].saves if all(save in reply.saves for reply in replies)), "")


def check_equal(endpoints: Sequence[str], restored: Sequence[str]) -> None:
    """Raise an error unless all servers have loaded the same checkpoint.

    Raises
    ------
    StateLostError
        The checkpoints differ; the message names the checkpoint of each server.
    """
    if len(set(restored)) > 1:
        found = ", ".join(
            f"{endpoint} has {f'the save {save}' if save else 'none'}"
            for endpoint, save in zip(endpoints, restored, strict=True)
        )
        raise StateLostError(
            f"the parameter servers have loaded different checkpoints: {found}; expected one that is "
            "complete on every server"
        )


def next_step(plan: TrainerPlan, steps: Sequence[int]) -> int:
    """Return a trainer's next step, given the steps of all servers.

    Raises
    ------
    StateLostError
        The steps differ by more than is possible in a mode with a common step.
    """
    holding = [step for server, step in enumerate(steps) if plan.tables or plan.blocks_on(server)]
    if plan.has_common_step and max(holding, default=0) - min(holding, default=0) > 1:
        raise StateLostError(
            f"the parameter servers {', '.join(plan.endpoints)} are at the steps "
            f"{', '.join(str(step) for step in steps)}; expected the same step, or two consecutive steps: a "
            "server has restarted without its state"
        )
    return min(holding, default=0)


def note_steps_past(trainer: int, calls: ServerCalls) -> None:
    """Log and count the steps that a late trainer has run after the others completed."""
    replies = calls.ask_all(lambda control, seconds: control.ask_steps_past(seconds))
    if past := max(reply.steps_past for reply in replies):
        progress.count("steps_past_the_others", past)
        _log.warning(
            "trainer %d joined late, and has made %d steps after the others completed, with its own data "
            "only; a loop over fleet.epochs() or fleet.steps() does not run such steps",
            trainer,
            past,
        )
