"""Tables in sync mode: a table is updated once every live trainer has sent its gradient of the step.

In each step, each trainer sends every server one gradient of each table; the gradient is empty if the trainer
has used no row on that server. The gradients of a step are kept until all have arrived, and are then summed
in the order of the trainers; this is affordable because rows are few compared with dense blocks. So a
restarted trainer leaves nothing in a sum, and a gradient that it resends is dropped if the step has already
been made.

The servers confirm to each trainer that a table has been updated, and only then does the trainer end its own
step. So no table is more than one step ahead of another table, of another server or of a dense block, and a
look-up finds the table at the step of the look-up. A restarted trainer may look up rows of the previous step:
rows that the last update has overwritten are kept until the next update.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import DeadlineExceededError, RemoteProtocolError, StateLostError
from fleet.parameter_server.modes.agreement import Participants
from fleet.parameter_server.modes.mode import Answer, Missing
from fleet.parameter_server.store import Origin
from fleet.parameter_server.table_store import RowUpdate, TableStore, append_ids
from fleet.tables import RowGradients, merge
from fleet.tables.ids import distinct_ids
from fleet.tables.index import find_among
from fleet.wire import NO_STEP, HyperParameters
from fleet.wire.rows import pack_row_gradient

__all__ = ["STEP_SECONDS", "SyncTables"]

STEP_SECONDS: Final = 600.0
"""The time limit for one step of a block or a table."""


@dataclass(slots=True)
class _Round:
    """The progress of one table in one step."""

    step: int = 0
    arrived: dict[int, RowGradients] = field(default_factory=dict)
    stepping: bool = False
    before: RowGradients | None = None
    """The rows that the last step changed, with their previous values; None before the first step."""
    ahead: dict[int, list[NDArray[np.int64]]] = field(default_factory=dict)
    """For each trainer, the ids that it looked up for the next step before this step was complete."""


class SyncTables:
    """The tables of a server in sync mode.

    Parameters
    ----------
    store : TableStore
    participants : Participants
        The trainers of the current steps; shared with the dense blocks.
    agreeing : Condition
        Guards the participants; acquired after a table's lock.
    """

    def __init__(self, store: TableStore, participants: Participants, agreeing: threading.Condition) -> None:
        self._store = store
        self._participants = participants
        self._agreeing = agreeing
        self._changed = {number: threading.Condition() for number in store.names}
        """The condition variable that guards the progress of each table."""
        self.rounds = {number: _Round() for number in store.names}
        """The progress of each table; empty if the server has no tables."""

    def resume(self, step: int) -> None:
        """Set every table's number of completed steps to the number in a checkpoint."""
        for round_ in self.rounds.values():
            round_.step = step

    def admit(self, trainer: int) -> None:
        """Drop the unused gradients that a trainer sent before it restarted."""
        for number, changed in self._changed.items():
            with changed:
                self._wait_until_stepped(number)
                self.rounds[number].arrived.pop(trainer, None)
                self.rounds[number].ahead.pop(trainer, None)

    def look_up(self, trainer: int, table: int, step: int, ids: NDArray[np.int64]) -> Tensor:
        """Return rows with the values that they had after `step` steps.

        For the step after the current one, this returns the current rows. When the table is updated, the
        trainer receives those of the rows that the step has changed.

        Raises
        ------
        StateLostError
            The rows no longer exist, or the table has not made the step.
        ConfigurationError
            An id is out of range.
        """
        with self._changed[table]:
            if self.rounds[table].stepping or self._store.failed.error is not None:
                self._wait_until_stepped(table)
            round_ = self.rounds[table]
            # Under the lock of the round, so that the rows are those of the step with which `step` is
            # compared.
            rows = self._store.rows(table, ids)
            if step == round_.step + 1:
                # A trainer that holds the table receives all changes anyway.
                if not self._store.held_by_trainers(table):
                    append_ids(round_.ahead.setdefault(trainer, []), ids)
                return rows
            if step == round_.step:
                return rows
            if step == round_.step - 1 and round_.before is not None:
                found, at = find_among(ids, round_.before.ids)
                rows[torch.from_numpy(found)] = round_.before.values[torch.from_numpy(at)]
                return rows
            raise StateLostError(
                f"trainer {trainer} requests rows of {self._name(table)} at step {step}, but this server is "
                f"at step {round_.step} and does not have them: a server has lost steps, and the job must "
                "restart from its last checkpoint"
            )

    def gradient(self, trainer: int, table: int, step: int, gradient: RowGradients) -> Sequence[Answer]:
        """Store a trainer's gradient until all gradients of the step have arrived.

        Raises
        ------
        RemoteProtocolError
            The table is at another step or already has the gradient, or an id is out of range.
        """
        self._store.check(table, gradient.ids)
        with self._changed[table]:
            round_ = self.rounds[table]
            # An earlier process of the trainer sent this gradient, and the step was made with it.
            if step == round_.step - 1:
                return [self._answer(table, round_, (trainer,))]
            if step != round_.step or trainer in round_.arrived:
                raise RemoteProtocolError(
                    f"trainer {trainer} sent a gradient of {self._name(table)} for step {step}, expected "
                    f"{'the next step' if step == round_.step else f'step {round_.step}'}"
                )
            round_.arrived[trainer] = gradient
        return ()

    def check_end(self, trainer: int, step: int) -> None:
        """Raise RemoteProtocolError if a trainer ends a step but has not sent every table's gradient."""
        open_ = [
            self._name(number)
            for number, round_ in self.rounds.items()
            if round_.step == step and trainer not in round_.arrived
        ]
        if open_:
            raise RemoteProtocolError(
                f"trainer {trainer} ends step {step} without a gradient of {', '.join(open_[:3])}; expected "
                "a gradient of each table, which is empty if no row has one"
            )

    def advance(self, table: int) -> list[Answer]:
        """Update a table if all gradients have arrived; return answers for the trainers that sent them."""
        changed = self._changed[table]
        with changed:
            round_, live = self.rounds[table], self._participants.live
            if round_.stepping or not live or not live <= round_.arrived.keys():
                return []
            # Claimed under the lock and stepped without it: look-ups of the table wait, and all else goes on.
            round_.stepping = True
        trainers = tuple(sorted(round_.arrived))
        try:
            with self._agreeing:
                divisor = len(self._participants.live)
                hyper = self._participants.hyper_of(round_.step, trainers)
                origins = tuple(
                    Origin(each, self._participants.attempts.get(each, 0), round_.step) for each in trainers
                )
            before = self._step(table, [round_.arrived[each] for each in trainers], divisor, hyper, origins)
        except BaseException as error:
            with changed:
                failure = self._store.failed.note(error)
                changed.notify_all()
            if failure is error:
                raise
            raise failure from error
        with changed:
            made = self.rounds[table] = _Round(round_.step + 1, before=before)
            changed.notify_all()
            waiting = [trainer for trainer in trainers if trainer in self._participants.live]
            others = tuple(trainer for trainer in waiting if trainer not in round_.ahead)
            answers = [self._answer(table, made, others)] if others else []
            return answers + [
                self._refresh(table, made, trainer, round_.ahead[trainer])
                for trainer in waiting
                if trainer in round_.ahead
            ]

    def arrived_bytes(self, table: int) -> int | None:
        """Return the size of all gradients of the step, or None if the table cannot be updated now.

        A gradient that arrives meanwhile in another thread is seen there.
        """
        with self._changed[table]:
            round_ = self.rounds[table]
            if round_.stepping or not self._participants.live <= round_.arrived.keys():
                return None
            return sum(each.values.nbytes for each in round_.arrived.values())

    def complete(self) -> list[Answer]:
        """Update the tables that waited only for a trainer that is no longer live."""
        return [answer for number in self.rounds for answer in self.advance(number)]

    def missing(self) -> Missing | None:
        """Return the gradients that the current step still needs, or None if nothing is missing."""
        for number, changed in self._changed.items():
            with changed:
                round_ = self.rounds[number]
                trainers = self._participants.live - round_.arrived.keys()
                if round_.arrived and trainers and not round_.stepping:
                    return Missing(round_.step, tuple(sorted(trainers)), self._name(number))
        return None

    def _name(self, table: int) -> str:
        return f"table {self._store.names[table]}"

    def _wait_until_stepped(self, table: int) -> None:
        """Wait until no thread is updating the table; the caller holds the table's lock."""
        failed = self._store.failed
        done = self._changed[table].wait_for(
            lambda: not self.rounds[table].stepping or failed.error is not None, STEP_SECONDS
        )
        failed.check()
        if not done:
            raise DeadlineExceededError(f"{self._name(table)} was not stepped within {STEP_SECONDS:g} s")

    def _step(
        self,
        table: int,
        gradients: Sequence[RowGradients],
        divisor: int,
        hyper: HyperParameters,
        origins: tuple[Origin, ...],
    ) -> RowGradients:
        """Apply the mean gradient; return the changed rows with their previous values."""
        total = merge(gradients) if len(gradients) > 1 else gradients[0]  # one trainer's ids are distinct
        if hyper == NO_STEP:
            return _none_of(total)
        self._store.check_reportable(table, total.ids.size)
        if divisor > 1:
            # Multiplied as for dense blocks; see `SyncServer._step`.
            total.values.mul_(1.0 / divisor)
        update = RowUpdate(table, total, hyper, origins, keeps=True)
        self._store.apply(update)
        if update.before is None:
            return _none_of(total)
        return RowGradients(update.gradient.ids, update.before)

    def _answer(self, table: int, round_: _Round, trainers: tuple[int, ...]) -> Answer:
        """Return the answer to a table's last step, with all changed rows if trainers store copies."""
        changed = None
        if self._store.held_by_trainers(table) and round_.before is not None:
            ids = round_.before.ids
            changed = pack_row_gradient(ids, self._store.read(table, ids).numpy())
        return Answer(table, round_.step, trainers, value=changed, of_table=True)

    def _refresh(
        self, table: int, round_: _Round, trainer: int, ahead: Sequence[NDArray[np.int64]]
    ) -> Answer:
        """Return the answer to a table's last step, with the changed rows that the trainer has requested."""
        changed = np.zeros(0, dtype=np.int64) if round_.before is None else round_.before.ids
        asked = ahead[0] if len(ahead) == 1 else distinct_ids(np.concatenate(ahead))[0]
        ids = asked[find_among(asked, changed)[0]]
        rows = pack_row_gradient(ids, self._store.read(table, ids).numpy()) if ids.size else None
        return Answer(table, round_.step, (trainer,), value=rows, of_table=True)


def _none_of(rows: RowGradients) -> RowGradients:
    """Return an empty copy of `rows` that does not keep their memory allocated."""
    return RowGradients(rows.ids[:0].copy(), rows.values[:0].clone())
