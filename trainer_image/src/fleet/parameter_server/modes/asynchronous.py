"""Async mode: a server applies each gradient on arrival and returns the new value at once.

As in Paddle, a gradient is not divided by the number of trainers, so N trainers make N times as many steps as
one. Gradients are stale, because other trainers have made steps since the trainer received its values.
DC-ASGD corrects gradients to first order for these steps.

`ImmediateServer` is the server side of all modes without a barrier.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.modes.mode import (
    Answer,
    AnsweredTrainer,
    Missing,
    Mode,
    ServerMode,
    Session,
    TrainerMode,
)
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.store import DenseStore, Origin, Target, Update
from fleet.parameter_server.table_store import RowUpdate, append_ids
from fleet.parameter_server.transport.arena import Arena, LazyBytes, bytes_of
from fleet.plan.config import DistributedMode
from fleet.tables import RowGradients
from fleet.tables.ids import distinct_ids
from fleet.wire import NO_STEP, HyperParameters
from fleet.wire.rows import pack_row_gradient

__all__ = ["Async", "ImmediateServer", "TrainerSteps", "compensate_delay"]


@dataclass(frozen=True)
class Async(Mode):
    """Async mode: trainers do not wait for each other.

    Attributes
    ----------
    dc_asgd : bool
        Whether to compensate gradients for their delay.
    """

    dc_asgd: bool = False

    name: ClassVar[str] = "async"
    programs: ClassVar[DistributedMode] = DistributedMode.ASYNC
    elastic: ClassVar[bool] = True

    def agreement(self) -> Mapping[str, str]:
        """Return the option that must be equal in all processes: whether delay is compensated."""
        return {"dc_asgd": str(self.dc_asgd)}

    def rule(self, target: Target, update: Update) -> None:
        """Update a block with one gradient, compensated for its delay if configured."""
        gradient = update.gradient
        if update.seen is not None:
            gradient = compensate_delay(gradient, target.value, update.seen)
        target.step(gradient)

    def make_server(self, shard: Shard, num_trainers: int) -> ServerMode:
        """Create the server side of the mode."""
        return ImmediateServer(shard, num_trainers, keeps_seen=self.dc_asgd)

    def make_trainer(self, session: Session) -> TrainerMode:
        """Create the trainer side of the mode."""
        return AnsweredTrainer(session)


class TrainerSteps:
    """The step counts of trainers that do not wait for each other, by block and table.

    Parameters
    ----------
    parts : collection of int
        The parts (blocks and tables); in each step, a trainer sends one gradient for each part.
    num_trainers : int
        The initial number of trainers; others may be admitted later.
    """

    def __init__(self, parts: Collection[int], num_trainers: int) -> None:
        self._parts = parts
        self._next = {trainer: dict.fromkeys(parts, 0) for trainer in range(num_trainers)}
        self._entered: dict[int, int] = {}
        """The first step of each trainer that joined late."""
        self._resumed: dict[int, int] = {}
        self._attempts = dict.fromkeys(range(num_trainers), 0)
        self.hyper: dict[int, HyperParameters] = dict.fromkeys(range(num_trainers), ())
        """The hyper-parameters of each trainer's current step."""

    @property
    def ahead(self) -> int:
        """The number of steps that the fastest trainer has completed."""
        # A copy of the keys, because another thread may admit a trainer meanwhile.
        return max((self.of(trainer) for trainer in list(self._next)), default=0)

    def of(self, trainer: int) -> int:
        """Return a trainer's next step: the one after its last complete step."""
        return max(self._entered.get(trainer, 0), min(self._next[trainer].values(), default=0))

    def parts(self, trainer: int) -> Mapping[int, int]:
        """Return, for each block and table, the step of a trainer's next gradient."""
        return self._next[trainer]

    def resume(self, step: int) -> None:
        """Set every trainer's next step to the step of a checkpoint."""
        for trainer in list(self._next):
            self._next[trainer] = dict.fromkeys(self._parts, step)

    def resume_each(self, steps: Mapping[int, int]) -> None:
        """Set the next step of each given trainer, including trainers that join later."""
        self._resumed = dict(steps)
        for trainer in steps.keys() & self._next.keys():
            self._next[trainer] = dict.fromkeys(self._parts, steps[trainer])

    def admit(self, trainer: int, attempt: int) -> bool:
        """Reset the state of a trainer that joins; return True if it is new to this server.

        A new trainer continues at the step of the most advanced trainer, so that it shares the remaining
        work. Other servers may have admitted the trainer at other steps, and it starts at the lowest of
        these. So this server accepts every gradient of the trainer, from step 0 on, as new.
        """
        self._attempts[trainer] = attempt
        if trainer in self._next:
            return False
        self.hyper[trainer] = ()
        self._entered[trainer] = self._resumed.get(trainer, self.ahead)
        self._next[trainer] = dict.fromkeys(self._parts, 0)
        return True

    def is_due(self, trainer: int, part: int, step: int) -> bool:
        """Return whether the gradient of a step has not been applied yet."""
        return step >= self._next[trainer][part]

    def advance(self, trainer: int, part: int, step: int) -> None:
        """Record that a trainer's gradient for a step was applied or does not exist."""
        self._next[trainer][part] = max(self._next[trainer][part], step + 1)

    def origin(self, trainer: int, step: int) -> Origin:
        """Return the origin of a gradient: its trainer, the trainer's attempt, and the step."""
        return Origin(trainer, self._attempts[trainer], step)


class ImmediateServer(ServerMode):
    """The server side of modes without barriers, which apply each gradient on arrival.

    `Mode.rule` determines the effect of a gradient on its block.

    A value is read only when its bytes are sent, so gradients of other trainers may change it until then. If
    updates carry the value that their trainer has seen, the answer instead has a copy of the value, made when
    the answer is created.

    Parameters
    ----------
    shard : Shard
        The blocks and tables.
    num_trainers : int
        The initial number of trainers; others may be admitted later.
    answers_gradients : bool
        Whether a gradient is answered with the resulting value; if not, a trainer requests values.
    keeps_seen : bool
        Whether updates carry the block's value that was last sent to their trainer. This needs memory for a
        copy of all blocks for each trainer.
    adds_rows : bool
        Whether gradients of rows are changes to be added; a trainer then receives the sums for its own rows.
    """

    def __init__(
        self,
        shard: Shard,
        num_trainers: int,
        *,
        answers_gradients: bool = True,
        keeps_seen: bool = False,
        adds_rows: bool = False,
    ) -> None:
        self._shard = shard
        self._store = shard.store
        self._tables = shard.tables
        self._answers_gradients = answers_gradients
        self._adds_rows = adds_rows
        self._seen: SeenValues | None = SeenValues(shard.store) if keeps_seen else None
        if self._seen is not None:
            for trainer in range(num_trainers):
                self._seen.begin(trainer)
        # Tables use the bitwise complement of their numbers, because blocks, too, are numbered from 0.
        self._steps = TrainerSteps([*shard.blocks, *(~table for table in shard.tables.names)], num_trainers)
        self._unsent: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
        """The ids of rows that have changed since they were last sent, by trainer and table."""
        self._unsent_lock = threading.Lock()

    @property
    def step(self) -> int:
        """The number of steps completed by the fastest trainer."""
        return self._steps.ahead

    def step_of(self, trainer: int) -> int:
        """Return the next step of a trainer."""
        return self._steps.of(trainer)

    def resume(self, step: int) -> None:
        """Set every trainer's next step to the step of a checkpoint."""
        self._steps.resume(step)

    def resume_each(self, steps: Mapping[int, int]) -> None:
        """Set the next step of each given trainer."""
        self._steps.resume_each(steps)

    def admit(self, trainer: int, attempt: int = 0) -> None:
        """Reset the state of a trainer that joins; gradients of its earlier process remain applied."""
        if not self._adds_rows:
            with self._unsent_lock:  # no earlier changes: the trainer looks up all rows after joining
                for table in self._tables.names:
                    if self._tables.held_by_trainers(table):
                        self._unsent[trainer, table] = []
        if self._steps.admit(trainer, attempt) and self._seen is not None:
            self._seen.begin(trainer)

    def pull(self, trainer: int, step: int) -> Sequence[Answer]:
        """Return the current value of every block, regardless of the trainer's step."""
        del step
        return [self._answer(trainer, block) for block in self._shard.blocks]

    def value(self, trainer: int, block: int) -> memoryview | LazyBytes:
        """Return the bytes to send as a block's value."""
        if self._seen is not None:
            return bytes_of(self._seen.of(trainer, block))
        return LazyBytes(
            self._shard.block_bytes[block], lambda begin, into: self._store.read(block, into, begin)
        )

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Record the hyper-parameters of a trainer's step, which may differ between trainers."""
        del step
        self._steps.hyper[trainer] = hyper_parameters

    def gradient(self, trainer: int, block: int, step: int) -> Sequence[Answer]:
        """Apply a gradient, unless it was already applied before the trainer restarted.

        Raises
        ------
        FleetError
            The gradient could not be applied; see `DenseStore.apply`.
        """
        try:
            if self._steps.is_due(trainer, block, step):
                # The gradient is applied directly from its receive buffer, which its connection does not
                # overwrite before this frame has been processed.
                gradient = self._shard.buffers.landing(trainer).tensor
                origin, hyper = self._steps.origin(trainer, step), self._steps.hyper[trainer]
                seen = self._seen.of(trainer, block) if self._seen is not None else None
                self._store.apply(Update(block, gradient, hyper, (origin,), seen))
                self._steps.advance(trainer, block, step)
        finally:  # even after an error: the buffer must be free when the trainer's next process joins
            with self._shard.buffers.changed:
                self._shard.buffers.forget(trainer)
        return [self._answer(trainer, block)] if self._answers_gradients else []

    def row_gradient(self, trainer: int, table: int, step: int, gradient: RowGradients) -> Sequence[Answer]:
        """Apply a gradient of rows, unless it was already applied before the trainer restarted.

        Raises
        ------
        FleetError
            An id is out of range, or the gradient could not be applied; see `TableStore.apply`.
        """
        self._tables.check(table, gradient.ids)
        if self._steps.is_due(trainer, ~table, step):
            hyper = self._steps.hyper[trainer]
            if hyper != NO_STEP or self._adds_rows:
                update = RowUpdate(table, gradient, hyper, (self._steps.origin(trainer, step),))
                self._tables.apply(update)
                gradient = update.gradient
            self._steps.advance(trainer, ~table, step)
        rows: memoryview | None = None
        if self._adds_rows:
            rows = pack_row_gradient(gradient.ids, self._tables.read(table, gradient.ids).numpy())
        elif self._tables.held_by_trainers(table):
            rows = self._changed_rows(trainer, table, gradient.ids)
        return [Answer(table, step + 1, (trainer,), value=rows, of_table=True)]

    def look_up(self, trainer: int, table: int, step: int, ids: NDArray[np.int64]) -> Tensor:
        """Return the current rows, regardless of the trainer's step."""
        del trainer, step
        return self._tables.rows(table, ids)

    def end(self, trainer: int, step: int, absent: Sequence[int]) -> Sequence[Answer]:
        """End a trainer's step; return the answers for the `absent` blocks, which have no gradient.

        Raises
        ------
        RemoteProtocolError
            A block is unknown, a block is neither absent nor was sent, or a table's gradient is missing.
        """
        steps = self._steps.parts(trainer)
        if open_ := [name for table, name in self._tables.names.items() if steps[~table] <= step]:
            raise RemoteProtocolError(
                f"trainer {trainer} ends step {step} without a gradient of table {', '.join(open_[:3])}; "
                "expected a gradient of each table, which is empty if no row has one"
            )
        missing, blocks = set(absent), self._shard.blocks
        if unknown := [block for block in absent if block not in blocks]:
            raise RemoteProtocolError(
                f"trainer {trainer} ends step {step}: {len(unknown)} of the absent blocks are not on this "
                "server; expected only blocks of this server"
            )
        early = [each.name for block, each in blocks.items() if steps[block] <= step and block not in missing]
        if early:
            raise RemoteProtocolError(
                f"trainer {trainer} ends step {step} without a gradient of {', '.join(early[:3])}; expected "
                "each block either to have a gradient or to be listed as absent"
            )
        for block in absent:
            self._steps.advance(trainer, block, step)
        return [self._answer(trainer, block) for block in absent] if self._answers_gradients else []

    def complete(self, trainer: int) -> Sequence[Answer]:
        """Discard the trainer's list of changed rows. No answers are due, because no trainer waits."""
        with self._unsent_lock:
            for key in [key for key in self._unsent if key[0] == trainer]:
                del self._unsent[key]
        return ()

    def missing(self) -> Missing | None:
        """Return None, because no step waits for trainers.

        Raises
        ------
        FleetError
            A gradient could not be applied.
        """
        self._store.failed.check()
        return None

    def _answer(self, trainer: int, block: int) -> Answer:
        if self._seen is not None:
            self._seen.renew(trainer, block)
        return Answer(block, self._steps.parts(trainer)[block], (trainer,))

    def _changed_rows(self, trainer: int, table: int, ids: NDArray[np.int64]) -> memoryview:
        """Return the rows in `ids`, and all other rows changed since the last answer to this trainer."""
        with self._unsent_lock:
            for (_, of), unsent in self._unsent.items():
                if of == table:
                    append_ids(unsent, ids)
            # Cleared before the rows are read: a row that changes in between is sent now and listed again, so
            # that no change is lost.
            own = self._unsent.get((trainer, table), [])
            parts = [ids, *own]
            own.clear()
        changed, _ = distinct_ids(np.concatenate(parts))
        self._tables.check_reportable(table, changed.size)
        return pack_row_gradient(changed, self._tables.read(table, changed).numpy())


class SeenValues:
    """Copies of the values that each trainer received last.

    Parameters
    ----------
    store : DenseStore
    """

    def __init__(self, store: DenseStore) -> None:
        self._store = store
        self._copies: dict[int, Arena[int]] = {}

    def begin(self, trainer: int) -> None:
        """Copy the current values for a trainer that joins."""
        self._copies[trainer] = Arena(self._store.extents)
        for block in self._store.extents:
            self.renew(trainer, block)

    def renew(self, trainer: int, block: int) -> None:
        """Copy a block's current value, which is about to be sent to a trainer."""
        self._store.read(block, bytes_of(self.of(trainer, block)))

    def of(self, trainer: int, block: int) -> Tensor:
        """Return a trainer's copy of a block's value, which `renew` overwrites in place."""
        return self._copies[trainer][block]


def compensate_delay(gradient: Tensor, value: Tensor, sent: Tensor) -> Tensor:
    """Correct a gradient, to first order, for the updates since its trainer received the value.

    Parameters
    ----------
    gradient, value, sent : Tensor
        The gradient, the current value, and the value for which the gradient was computed, all of the same
        shape. None of them is modified.

    Returns
    -------
    Tensor
        ``gradient + gradient * gradient * (value - sent)``.

    Raises
    ------
    ValueError
        The shapes differ; the message gives all three.

    Notes
    -----
    DC-ASGD with lambda 1: Zheng et al. 2017, arXiv:1609.08326.
    """
    if not gradient.shape == value.shape == sent.shape:
        raise ValueError(
            f"a gradient of shape {list(gradient.shape)}, a value of {list(value.shape)} and the value sent "
            f"of {list(sent.shape)}; expected one shape"
        )
    # The order of operations is Paddle's, for equal rounding: drift times gradient, times gradient.
    return gradient + (value - sent) * gradient * gradient
