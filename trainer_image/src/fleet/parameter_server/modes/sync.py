"""Sync mode: a block is updated once every live trainer has sent a gradient or announced that it has none.

Gradients are summed in the order of the trainers' indexes, regardless of the order of arrival, so that runs
are bitwise reproducible. They are added on arrival. A gradient that arrives before its turn waits in a buffer
for the gradients of lower trainers. If no buffer is free, it waits in its trainer's socket. No thread waits
for another: the thread that detects a gradient's turn adds the gradient, and the thread that completes a sum
updates the block. A block that is clipped by a norm is averaged first; the call that adds the last part of
the norm then updates the block.

A restarted trainer receives the values of the same step from all servers: the lowest step that any block has
made. Its previous process may have ended between two gradients, so that some blocks were updated with its
gradient and others still wait for one. For a block that is a step ahead, the server keeps the value from
before the step until a trainer sends a gradient of the next step, because that trainer has seen all servers
make the step. Over TCP this needs no additional memory: the value is kept in the block's sum buffer until the
next sum begins there. Before the step, the sum moves to the buffer of the gradient that completes it, which
frees the sum buffer. The value needs other memory during the step only if one gradient is the whole sum, or
if a norm is pending.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import torch
from torch import Tensor

from fleet.errors import DeadlineExceededError, RemoteProtocolError, StateLostError
from fleet.parameter_server.modes.agreement import KnownNorm, NormBook, Participants, sum_of_squares
from fleet.parameter_server.modes.mode import (
    Answer,
    AnsweredTrainer,
    Missing,
    Mode,
    ServerMode,
    Session,
    TrainerMode,
)
from fleet.parameter_server.modes.sync_tables import STEP_SECONDS, SyncTables
from fleet.parameter_server.receive_buffers import Buffer, Turn
from fleet.parameter_server.shard import NormPart, Shard
from fleet.parameter_server.store import Origin, Update
from fleet.parameter_server.transport.arena import bytes_of, copy_bytes
from fleet.parameter_server.waits import name_trainers
from fleet.plan.config import DistributedMode
from fleet.tables import RowGradients
from fleet.wire import NO_STEP, HyperParameters

__all__ = ["Sync", "SyncServer"]

_AHEAD: Final = (
    "trainer %d (attempt %d) receives the values of step %d, which %d of %d blocks here have already made: "
    "its gradients for these blocks will be dropped"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sync(Mode):
    """Sync mode: all trainers step together. If a trainer is lost, the job ends."""

    name: ClassVar[str] = "sync"
    programs: ClassVar[DistributedMode] = DistributedMode.SYNC
    survives_loss: ClassVar[bool] = False

    def make_server(self, shard: Shard, num_trainers: int) -> ServerMode:
        """Create the server side of the mode."""
        return SyncServer(shard, num_trainers)

    def make_trainer(self, session: Session) -> TrainerMode:
        """Create the trainer side of the mode."""
        return AnsweredTrainer(session)


@dataclass(slots=True, eq=False)
class _Round:
    """The progress of one block in one step."""

    step: int = 0
    landed: dict[int, Buffer] = field(default_factory=dict)
    """Gradients that have arrived but are not yet in the sum."""
    summed: dict[int, Origin] = field(default_factory=dict)
    """The origins of the gradients in the sum, in the order of the sum."""
    absent: set[int] = field(default_factory=set)
    """Trainers that have announced that they have no gradient."""
    adding: int | None = None
    """The trainer whose gradient a thread is currently adding."""
    total: Buffer | None = None
    stepping: bool = False
    averaged: bool = False
    """Whether the block is waiting for the norm that clips it."""
    hyper: HyperParameters = NO_STEP
    again: set[int] = field(default_factory=set)
    """Restarted trainers that will resend a gradient that the sum already includes or has omitted."""
    before: Buffer | None = None
    """The value before the last step; None if the step left it unchanged, or if it no longer exists."""
    unchanged: bool = False
    """Whether the last step left the value unchanged."""

    def has(self, trainer: int) -> bool:
        """Return whether the step needs no more input from a trainer."""
        return trainer in self.landed or trainer in self.summed or trainer in self.absent

    @property
    def present(self) -> set[int]:
        """The trainers from which the step needs no more input."""
        return self.landed.keys() | self.summed.keys() | self.absent

    @property
    def busy(self) -> bool:
        """True while a thread is changing the sum, and after the sum has become final."""
        return self.adding is not None or self.stepping or self.averaged


class SyncServer(ServerMode):
    """The server side of sync mode, whose state is guarded by the lock of the receive buffers.

    Parameters
    ----------
    shard : Shard
        The blocks and tables to step.
    num_trainers : int
        The number of trainers, each of which counts until it completes.
    """

    defers: ClassVar[bool] = True

    def __init__(self, shard: Shard, num_trainers: int) -> None:
        self._shard = shard
        self._store = shard.store
        self._buffers = shard.buffers
        self._changed = shard.buffers.changed
        self._participants = Participants(num_trainers)
        self._rounds = {block: _Round() for block in shard.blocks}
        self._tables = SyncTables(shard.tables, self._participants, self._changed)
        # Bound directly, which saves a call: every forward pass of an embedding comes here.
        self.look_up = self._tables.look_up  # type: ignore[method-assign]
        self._norms = NormBook(shard.plan.clipping.norms, shard.plan.server, shard.send_norm_part)
        self._begun: dict[int, int] = {}
        """The latest step that each trainer has begun."""
        self._returning: set[int] = set()
        """Trainers that have joined but begun no step; they may request values from before the last step."""
        self._averaged_over = self._participants.live
        self._aside: list[Tensor] = []
        """Memory for values saved during a step: as many tensors as blocks were ever updated concurrently."""
        self._largest_bytes = max(shard.block_bytes.values(), default=0)

    @property
    def step(self) -> int:
        """The number of steps that all blocks and tables have completed."""
        with self._changed:
            return self._lowest_step()

    def step_of(self, trainer: int) -> int:
        """Return a trainer's next step, which is the same for all trainers."""
        del trainer
        return self.step

    def resume(self, step: int) -> None:
        """Set the number of completed steps to a checkpoint's; called before any trainer sends a gradient."""
        with self._changed:
            for round_ in self._rounds.values():
                round_.step = step
        self._tables.resume(step)

    def admit(self, trainer: int, attempt: int = 0) -> None:
        """Reset the state of a trainer that joins; drop its old gradients that are not in a sum yet.

        A gradient that a sum includes stays in the sum, and is dropped when the trainer resends it. If the
        earlier process announced that it had no gradient for a block, and the block's sum has begun, a
        gradient for this block is also dropped.
        """
        with self._changed:
            self._wait_for(
                lambda: not any(self._uses(round_, trainer) for round_ in self._rounds.values()), "a step"
            )
            self._participants.admit(trainer, attempt)
            self._returning.add(trainer)
            for block, round_ in self._rounds.items():
                self._drop(trainer, block, round_)
            self._buffers.forget(trainer)
        self._tables.admit(trainer)

    def pull(self, trainer: int, step: int) -> Sequence[Answer]:
        """Return every block's value after `step` steps, for a trainer that has not sent any gradient.

        Raises
        ------
        StateLostError
            A block is at an earlier step, or is more than one step ahead.
        """
        answers, rounds = [], self._rounds
        with self._changed:
            for block in rounds:
                name = self._shard.blocks[block].name
                self._wait_for(lambda: not rounds[block].stepping, name)  # noqa: B023
                if (value := self._value_at(block, step)) is None:
                    raise StateLostError(
                        f"trainer {trainer} requests {name} at step {step}, but this server is at step "
                        f"{rounds[block].step} and no longer has that value: a server has lost steps, and "
                        "the job must restart from its last checkpoint"
                    )
                if (
                    trainer in rounds[block].again
                ):  # the block does not wait for this trainer, and may be updated at any time
                    value = memoryview(bytearray(value))
                answers.append(Answer(block, step, (trainer,), value=value))
            if ahead := sum(round_.step > step for round_ in rounds.values()):
                attempt = self._participants.attempts.get(trainer, 0)
                _log.info(_AHEAD, trainer, attempt, step, ahead, len(rounds))
        return answers

    def turn(self, trainer: int, block: int) -> Turn:
        """Return when to add an arriving gradient. A gradient that is not needed is dropped on arrival."""
        round_ = self._rounds[block]
        if self._begun.get(trainer, -1) != round_.step or round_.has(trainer):
            return Turn.NEXT
        if min(self._awaited(round_), default=trainer) < trainer:
            return Turn.LATER
        if round_.total is not None:
            return Turn.NEXT
        # The gradient that begins the sum is about to land in the sum buffer, where the previous value is.
        self._free_place(round_)
        return Turn.FIRST

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Record the hyper-parameters of a trainer's step.

        Raises
        ------
        ConfigurationError
            Another trainer has different hyper-parameters for this step.
        """
        with self._changed:
            self._begun[trainer] = step
            returns = trainer in self._returning
            if returns:
                self._returning.discard(trainer)
                self._changed.notify_all()
            # Only a restarted trainer may begin a step that is already known and complete.
            forgets = returns or step not in self._participants.hyper
            lowest = self._lowest_step() if forgets else 0
            self._participants.begin(trainer, step, hyper_parameters, lowest)

    def gradient(self, trainer: int, block: int, step: int) -> Sequence[Answer]:
        """Accept a gradient that is complete in its receive buffer; `advance` adds it to the sum.

        Raises
        ------
        RemoteProtocolError
            The block is at another step, or already has the gradient.
        """
        with self._changed:
            gradient = self._buffers.take(trainer)
            round_ = self._rounds[block]
            if step == round_.step and not round_.has(trainer):
                round_.landed[trainer] = gradient
                return ()
            self._buffers.release(gradient)
            return self._repeated(trainer, block, step)

    def row_gradient(self, trainer: int, table: int, step: int, gradient: RowGradients) -> Sequence[Answer]:
        """Store a gradient of a table's rows until all gradients of the step have arrived."""
        return self._tables.gradient(trainer, table, step, gradient)

    def advance(self, number: int, *, of_table: bool = False) -> Sequence[Answer]:
        """Add arrived gradients to the sum of a block or table; once the sum is complete, apply the sum."""
        if of_table:
            return self._tables.advance(number)
        try:
            return self._step(number) if self._sum(number) else ()
        except BaseException as error:
            self._fail(error)
            raise

    def arrived_bytes(self, table: int, num_bytes: int) -> int | None:
        """Return the size of all gradients of a table's step, or None if the table cannot be updated now."""
        del num_bytes
        return self._tables.arrived_bytes(table)

    def end(self, trainer: int, step: int, absent: Sequence[int]) -> Sequence[Answer]:
        """End a trainer's step, in which the trainer has no gradient for the `absent` blocks.

        Raises
        ------
        RemoteProtocolError
            A block is unknown, a block is neither absent nor was sent, or a table's gradient is missing.
        """
        if self._tables.rounds:
            self._tables.check_end(trainer, step)
        with self._changed:
            unknown = [block for block in absent if block not in self._rounds]
            early = [block for block, round_ in self._rounds.items() if round_.step < step]
            if unknown or early:
                raise RemoteProtocolError(
                    f"trainer {trainer} ends step {step}: {len(unknown)} of the absent blocks are not on "
                    f"this server, and {len(early)} blocks have not reached the step; expected none of either"
                )
            late = [block for block in absent if self._rounds[block].step > step]
            for block in late:
                self._check_recent(trainer, block, step)
            for block in set(absent).difference(late):
                self._rounds[block].absent.add(trainer)
                self._rounds[block].again.discard(trainer)
            open_ = [
                self._shard.blocks[block].name
                for block, round_ in self._rounds.items()
                if round_.step == step and (not round_.has(trainer) or trainer in round_.again)
            ]
            if open_:
                raise RemoteProtocolError(
                    f"trainer {trainer} ends step {step} without a gradient of {', '.join(open_[:3])}; "
                    "expected each block either to have a gradient or to be listed as absent"
                )
            answers = [Answer(block, self._rounds[block].step, (trainer,)) for block in late]
            # An absence may make it the turn of a gradient that is waiting for a buffer.
            if absent:
                self._changed.notify_all()
        for block in absent:
            answers += self.advance(block)
        return answers

    def complete(self, trainer: int) -> Sequence[Answer]:
        """Stop waiting for a trainer that has completed; return the answers to send now."""
        with self._changed:
            self._participants.live -= {trainer}
            self._returning.discard(trainer)
            self._changed.notify_all()
        answers = [answer for block in self._rounds for answer in self.advance(block)]
        return answers + self._tables.complete()

    def norm(self, part: NormPart) -> Sequence[Answer]:
        """Add another server's part of a norm; return the answers to send now.

        Raises
        ------
        RemoteProtocolError
            No such norm covers a block of this server.
        """
        try:
            with self._changed:
                present = self._rounds[self._norms.first_block(part.key)].step
            known = self._norms.add_part(part, present)
        except KeyError as error:
            raise RemoteProtocolError(
                f"server {part.server} sent its part of the norm of {part.key or 'all gradients'}, but that "
                "norm does not cover blocks of both servers; do all replicas run the same script?"
            ) from error
        return self._step_clipped(known) if known is not None else []

    def missing(self) -> Missing | None:
        """Return the input that the current step still needs, or None if nothing is missing.

        Raises
        ------
        FleetError
            A block or a table could not be updated, so the current step will never end.
        """
        with self._changed:
            self._store.failed.check()
            for block, round_ in self._rounds.items():
                present = round_.present
                trainers = self._participants.live - present - self._buffers.held
                if present and trainers and not round_.busy:
                    return Missing(round_.step, tuple(sorted(trainers)), self._shard.blocks[block].name)
        if (pending := self._norms.pending()) is not None:
            return Missing(pending.step, (), f"the norm of {pending.norm.name}", pending.servers)
        return self._tables.missing()

    # The private methods from here to `_wait_for` are called with the lock held.

    def _lowest_step(self) -> int:
        """Return the number of steps that all blocks and tables have completed."""
        steps = [round_.step for round_ in self._rounds.values()]
        return min(steps + [round_.step for round_ in self._tables.rounds.values()], default=0)

    def _awaited(self, round_: _Round) -> frozenset[int]:
        """Return the trainers whose gradients the sum still needs."""
        return (self._participants.live | round_.landed.keys()) - round_.summed.keys() - round_.absent

    @staticmethod
    def _uses(round_: _Round, trainer: int) -> bool:
        """Return whether a thread is currently using a gradient of this trainer."""
        return round_.adding == trainer or (round_.stepping and round_.has(trainer))

    def _drop(self, trainer: int, block: int, round_: _Round) -> None:
        """Drop a gradient that a trainer sent before it restarted, so that the trainer can send it again."""
        if (landed := round_.landed.pop(trainer, None)) is not None:
            self._buffers.release(landed)
        # A sum of this gradient alone begins again. From a larger sum it cannot be subtracted exactly.
        if round_.summed.keys() == {trainer} and not round_.busy and round_.total is not None:
            self._buffers.release(round_.total)
            round_.total = None
            round_.summed.clear()
        # A sum has begun, or the gradient that begins a sum is landing in the block's sum buffer.
        keeps_before = round_.before is not None and round_.before.in_place
        begun = bool(round_.summed) or (block in self._buffers.begun and not keeps_before)
        if round_.averaged or trainer in round_.summed or (trainer in round_.absent and begun):
            round_.again.add(trainer)
        else:
            round_.absent.discard(trainer)

    def _value_at(self, block: int, step: int) -> memoryview | None:
        """Return a block's value after `step` steps, or None if the server no longer has that value."""
        round_ = self._rounds[block]
        # One previous value is enough: a block makes no second step without a gradient of the returning
        # trainer, which sends none before it has all values of the first.
        if step == round_.step or (step == round_.step - 1 and round_.unchanged):
            return self._store.view(block)
        if step == round_.step - 1 and round_.before is not None:
            return round_.before.bytes
        return None

    def _free_place(self, round_: _Round) -> None:
        """Free the buffer with a block's previous value, unless a restarted trainer may request the value."""
        if round_.before is not None and not self._returning:
            self._buffers.release(round_.before)
            round_.before = None

    def _repeated(self, trainer: int, block: int, step: int) -> Sequence[Answer]:
        """Return the answers to a gradient that the trainer already sent before it restarted.

        Raises
        ------
        RemoteProtocolError
            No earlier process has sent the gradient.
        """
        round_ = self._rounds[block]
        self._check_recent(trainer, block, step)
        if step < round_.step:  # the step was made, with or without the gradient
            return [Answer(block, round_.step, (trainer,))]
        if step == round_.step and trainer in round_.again:
            round_.again.remove(trainer)
            return []
        raise RemoteProtocolError(
            f"trainer {trainer} sent a gradient of {self._shard.blocks[block].name} for step {step}, "
            f"expected {'the next step' if step == round_.step else f'step {round_.step}'}"
        )

    def _check_recent(self, trainer: int, block: int, step: int) -> None:
        """Raise an error if a trainer is more than one step behind, as after a late load of a checkpoint."""
        if step < (now := self._rounds[block].step) - 1:
            raise RemoteProtocolError(
                f"trainer {trainer} is at step {step} of {self._shard.blocks[block].name}, expected step "
                f"{now} or {now - 1}: a checkpoint was loaded after this trainer joined; load it on every "
                "trainer before its first step, or on the servers: fleet.init_server(model_dir)"
            )

    def _wait_for(self, done: Callable[[], bool], name: str) -> None:
        """Wait until `done` returns True; raise an error if a step has failed or takes too long."""
        failed = self._store.failed
        if not self._changed.wait_for(lambda: done() or failed.error is not None, STEP_SECONDS):
            raise DeadlineExceededError(f"{name} has not been stepped within {STEP_SECONDS:g} s")
        failed.check()

    # The methods below are called without the lock.

    def _step_clipped(self, known: KnownNorm) -> list[Answer]:
        """Clip the gradients of this server's blocks that a norm covers, and update these blocks."""
        answers: list[Answer] = []
        try:
            for block in known.norm.blocks:
                round_ = self._rounds[block]
                with self._changed:
                    round_.stepping = True
                if round_.total is not None:
                    round_.total.tensor.mul_(known.coefficient)
                answers.append(self._finish(block))
        except BaseException as error:
            self._fail(error)
            raise
        return answers

    def _fail(self, error: BaseException) -> None:
        """Record the error of a failed step, which is not retried; raise the error for all trainers."""
        with self._changed:
            failure = self._store.failed.note(error)
            self._changed.notify_all()
        if failure is not error:
            raise failure from error

    def _sum(self, block: int) -> bool:
        """Add gradients to the sum in trainer order; return True if the caller must update the block."""
        while True:
            with self._changed:
                round_ = self._rounds[block]
                awaited, live = self._awaited(round_), self._participants.live
                if round_.busy:
                    return False
                if not awaited:
                    # Without a live trainer there is nobody to answer, and no step is made.
                    round_.stepping = bool(live)
                    return round_.stepping
                trainer = min(awaited)
                if trainer not in round_.landed:
                    return False
                gradient, round_.adding = round_.landed[trainer], trainer
                if round_.total is None and not gradient.stays:
                    self._free_place(round_)
                # A block that waits for a norm is not claimed before the sum is complete.
                is_last = len(awaited) == 1 and bool(live) and block not in self._norms.blocks
                round_.stepping = is_last
            spent: Buffer | None = gradient
            if round_.total is None:
                round_.total = gradient if gradient.stays else self._buffers.begin_sum(gradient)
                spent = None
            elif is_last and round_.total.in_place:
                # The previous value will be kept in the sum buffer, so the sum moves to the gradient's
                # buffer. The bits are the same, because an addition of two numbers is commutative.
                gradient.tensor.add_(round_.total.tensor)
                spent, round_.total = round_.total, gradient
            else:
                round_.total.tensor.add_(gradient.tensor)
            with self._changed:
                if spent is not None:
                    self._buffers.release(spent)
                del round_.landed[trainer]
                attempt = self._participants.attempts.get(trainer, 0)
                round_.summed[trainer] = Origin(trainer, attempt, round_.step)
                round_.adding = None
                self._changed.notify_all()
            if is_last:
                return True

    def _step(self, block: int) -> list[Answer]:
        """Average a block's summed gradient, then update the block or add to the gradients' norm."""
        round_ = self._rounds[block]
        with self._changed:
            live = self._participants.live
            if self._averaged_over != live:
                self._averaged_over = live
                _log.warning(
                    "from step %d on, gradients are averaged over %s: the other trainers have completed",
                    round_.step,
                    name_trainers(sorted(live)),
                )
            round_.hyper = self._participants.hyper_of(round_.step, round_.summed)
        mean = round_.total.tensor if round_.total is not None and round_.hyper != NO_STEP else None
        if mean is not None and len(live) > 1:
            # The program's operator `scale` has the factor 1 / N. A division would round differently unless N
            # is a power of two.
            mean.mul_(1.0 / len(live))
        if block not in self._norms.blocks:
            return [self._finish(block)]
        squares = sum_of_squares(mean) if mean is not None else 0.0
        with self._changed:
            # Before the part is added: another server's part may then complete the norm, and its thread steps
            # the block.
            round_.averaged, round_.stepping = True, False
            self._changed.notify_all()
        known = self._norms.add(round_.step, block, squares)
        return self._step_clipped(known) if known is not None else []

    def _finish(self, block: int) -> Answer:
        """Update a block if it has a gradient, and begin its next step.

        The answer is for the trainers from which the step needed no more input.
        """
        round_ = self._rounds[block]
        before: Buffer | None = None
        if round_.total is not None and round_.hyper != NO_STEP:
            before = self._apply(block, round_, round_.total)
        with self._changed:
            live = self._participants.live
            trainers = tuple(trainer for trainer in sorted(live) if trainer not in round_.again)
            self._rounds[block] = _Round(round_.step + 1, before=before, unchanged=before is None)
            for spent in (round_.total, round_.before):
                if spent is not None and spent is not before:
                    self._buffers.release(spent)
            self._changed.notify_all()
        return Answer(block, round_.step + 1, trainers, changed=before is not None)

    def _apply(self, block: int, round_: _Round, total: Buffer) -> Buffer:
        """Update a block with its summed gradient; return a buffer with the block's previous value."""
        value, place = self._store.view(block), round_.before
        update = Update(block, total.tensor, round_.hyper, tuple(round_.summed.values()))
        if place is None and total.in_place:
            # The sum occupies the sum buffer until the block is updated, so the value is saved in other
            # memory.
            try:
                aside = self._aside.pop()
            except IndexError:
                aside = torch.empty(self._largest_bytes, dtype=torch.uint8)
            copy = aside[: len(value)]
            if value:
                copy.copy_(torch.frombuffer(value, dtype=torch.uint8))
            self._store.apply(update)
            copy_bytes(bytes_of(copy), total.bytes)
            self._aside.append(aside)
            return total
        if place is None:
            with self._changed:
                place = self._buffers.sum_buffer(block)
        copy_bytes(value, place.bytes)
        self._store.apply(update)
        return place
