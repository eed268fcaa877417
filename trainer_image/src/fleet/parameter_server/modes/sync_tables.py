"""Tables in the sync mode: a table is stepped once every live trainer's gradient of the step has come.

Each trainer sends one gradient of each table in each step to every server, an empty one where it has touched
no row there. Those of a step are kept until all are here, and summed in the order of the trainers: rows are
few beside what the dense blocks hold. So a trainer that comes back leaves nothing in a sum, and what it sends
again of a step that has been made is dropped.

A trainer is told when a table has made the step, and ends its own only then. So no table is more than a step
ahead of another, here or on another server, nor of a dense block; and a look-up of the present step finds
the table there. One that comes back may ask for rows of the step before: those that the last update has
overwritten are kept, with their ids, until the next one.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import DeadlineExceededError, RemoteProtocolError, StateLostError
from fleet.parameter_server.modes.hyper import AgreedHyper
from fleet.parameter_server.modes.interface import Answer, Missing, Work
from fleet.parameter_server.modes.noted import note
from fleet.parameter_server.store import Origin
from fleet.parameter_server.table_store import RowUpdate, TableStore
from fleet.tables import RowGradients, merge
from fleet.tables.index import find_among
from fleet.tables.kernels import distinct_ids
from fleet.wire import NO_STEP, HyperParameters
from fleet.wire.rows import pack_row_gradient

__all__ = ["SyncTables"]

_STEP_SECONDS = 600.0
"""How long one step of a table may take."""


@dataclass(slots=True)
class _Round:
    """One table's progress through one step."""

    step: int = 0
    arrived: dict[int, RowGradients] = field(default_factory=dict)
    stepping: bool = False
    before: RowGradients | None = None
    """Rows that the last step has changed, as they were before; None where there was no last step here."""
    ahead: dict[int, list[NDArray[np.int64]]] = field(default_factory=dict)
    """By trainer, ids whose rows it has asked for before this step, for the next one."""


class SyncTables:
    """The tables of one server in the sync mode; see `TableServer`.

    Parameters
    ----------
    store : TableStore
    num_trainers : int
        How many trainers take part until they complete.
    """

    def __init__(self, store: TableStore, num_trainers: int) -> None:
        self._store = store
        self._changed = {number: threading.Condition() for number in store.names}
        """By table: held by whoever looks at its round or changes that."""
        self._agreeing = threading.Lock()
        """Held by whoever changes who is live, or what has been said of steps; alone, or after a table's."""
        self._live = frozenset(range(num_trainers))
        self._incarnations: dict[int, int] = {}
        self._hyper = AgreedHyper()
        self._rounds = {number: _Round() for number in store.names}

    @property
    def step(self) -> int:
        """The number of steps that every table has made."""
        return _lowest(self._rounds)

    def step_of(self, trainer: int) -> int:
        """Return the step that a trainer makes next: the same for all of them."""
        del trainer
        return self.step

    def resume(self, step: int) -> None:
        """Go on at a step that a checkpoint holds."""
        for round_ in self._rounds.values():
            round_.step = step

    def admit(self, trainer: int, incarnation: int) -> None:
        """Drop what an earlier life of a trainer has sent for a step that is not being made."""
        with self._agreeing:
            self._live |= {trainer}
            self._incarnations[trainer] = incarnation
        for number, changed in self._changed.items():
            with changed:
                self._wait_until_stepped(number)
                self._rounds[number].arrived.pop(trainer, None)
                self._rounds[number].ahead.pop(trainer, None)

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Take the hyper-parameters of a trainer's step; those of others are compared elsewhere."""
        with self._agreeing:
            self._hyper.say(trainer, step, hyper_parameters, _lowest(self._rounds))

    def look_up(self, trainer: int, table: int, step: int, ids: NDArray[np.int64]) -> Tensor:
        """Return the rows that a table had after so many steps.

        Those of the step after the present one are the present ones: once it is made, the trainer is told of
        those that it has changed.

        Raises
        ------
        StateLostError
            They are gone, or the table has not made the step.
        ConfigurationError
            An id is out of range.
        """
        with self._changed[table]:
            self._wait_until_stepped(table)
            round_ = self._rounds[table]
            rows = self._store.look_up(table, ids)
            if step == round_.step + 1:
                if not self._store.tells(table):  # a trainer that holds the table is told of all changes
                    note(round_.ahead.setdefault(trainer, []), ids)
                return rows
            if step == round_.step:
                return rows
            if step == round_.step - 1 and round_.before is not None:
                return _with_rows_of(rows, ids, round_.before)
            raise StateLostError(
                f"trainer {trainer} asks for rows of {self._name(table)} of step {step}, and this server, at "
                f"step {round_.step}, does not have them: a server has lost steps, and the job must start "
                "again from its last checkpoint"
            )

    def gradient(
        self, trainer: int, table: int, step: int, gradient: RowGradients
    ) -> Sequence[Answer] | Work:
        """Keep a trainer's gradient of a step; return the work of making the step, if it was the last.

        Raises
        ------
        RemoteProtocolError
            The table is not as far as the trainer believes, or has the gradient already; or an id is none of
            the table's.
        """
        self._store.check(table, gradient.ids)
        with self._changed[table]:
            round_ = self._rounds[table]
            if step == round_.step - 1:  # made with what an earlier life of the trainer has sent
                return [_tell(self._store, table, round_, (trainer,))]
            if step != round_.step or trainer in round_.arrived:
                raise RemoteProtocolError(
                    f"trainer {trainer} sent a gradient of {self._name(table)} for step {step}, expected "
                    f"{'the next step' if step == round_.step else f'step {round_.step}'}"
                )
            round_.arrived[trainer] = gradient
            if not _take_complete(round_, self._live):
                return []
        return partial(self._make, table)

    def end(self, trainer: int, step: int) -> None:
        """Check that a trainer which ends a step has sent every table's gradient."""
        open_ = [
            self._name(number)
            for number, round_ in self._rounds.items()
            if round_.step == step and trainer not in round_.arrived
        ]
        if open_:
            raise RemoteProtocolError(
                f"trainer {trainer} ends step {step} without a gradient of {', '.join(open_[:3])}; expected "
                "one of each table, an empty one where no row has any"
            )

    def complete(self, trainer: int) -> Sequence[Answer]:
        """Go on without a trainer that has finished."""
        with self._agreeing:
            self._live -= {trainer}
        ready = []
        for number, changed in self._changed.items():
            with changed:
                if _take_complete(self._rounds[number], self._live):
                    ready.append(number)
        return [answer for number in ready for answer in self._make(number)]

    def missing(self) -> Missing | None:
        """Return what the step in progress waits for; None while nothing has begun to wait.

        Raises
        ------
        FleetError
            A table could not be stepped.
        """
        self._store.failed.check()
        for number, changed in self._changed.items():
            with changed:
                round_ = self._rounds[number]
                awaited = self._live - round_.arrived.keys()
                if round_.arrived and awaited and not round_.stepping:
                    return Missing(round_.step, tuple(sorted(awaited)), self._name(number))
        return None

    def _name(self, table: int) -> str:
        return f"table {self._store.names[table]}"

    def _wait_until_stepped(self, table: int) -> None:
        """Wait for a thread that makes a table's step; with the table's lock held."""
        failed = self._store.failed
        done = self._changed[table].wait_for(
            lambda: not self._rounds[table].stepping or failed.error is not None, _STEP_SECONDS
        )
        failed.check()
        if not done:
            raise DeadlineExceededError(f"{self._name(table)} was not stepped within {_STEP_SECONDS:g} s")

    def _make(self, table: int) -> list[Answer]:
        """Make a claimed table's step; the answer is for those whose gradients it has."""
        round_, changed = self._rounds[table], self._changed[table]
        trainers = tuple(sorted(round_.arrived))
        try:
            with self._agreeing:
                divisor, hyper = len(self._live), self._hyper.of(round_.step, trainers)
            before = self._step(table, trainers, divisor, hyper)
        except BaseException as error:
            with changed:
                failure = self._store.failed.note(error)
                changed.notify_all()
            if failure is error:
                raise
            raise failure from error
        with changed:
            self._rounds[table] = _Round(round_.step + 1, before=before)
            changed.notify_all()
            told = [trainer for trainer in trainers if trainer in self._live]
            others = tuple(trainer for trainer in told if trainer not in round_.ahead)
            answers = [_tell(self._store, table, self._rounds[table], others)] if others else []
            return answers + [
                _refresh(self._store, table, self._rounds[table], trainer, round_.ahead[trainer])
                for trainer in told
                if trainer in round_.ahead
            ]

    def _step(
        self, table: int, trainers: Sequence[int], divisor: int, hyper: HyperParameters
    ) -> RowGradients:
        """Apply the mean of the gradients; return the rows that it changes as they were before."""
        round_ = self._rounds[table]
        given = [round_.arrived[trainer] for trainer in trainers]
        total = merge(given) if len(given) > 1 else given[0]  # a trainer gives each id once
        nothing = RowGradients(total.ids[:0].copy(), total.values[:0].clone())
        if hyper == NO_STEP:
            return nothing
        self._store.check_told(table, total.ids.size)
        if divisor > 1:
            total.values.mul_(1.0 / divisor)
        origins = tuple(Origin(each, self._incarnations.get(each, 0), round_.step) for each in trainers)
        update = RowUpdate(table, total, hyper, origins, keeps=True)
        self._store.apply(update)
        return RowGradients(total.ids, update.before) if update.before is not None else nothing


def _lowest(rounds: Mapping[int, _Round]) -> int:
    return min((round_.step for round_ in rounds.values()), default=0)


def _take_complete(round_: _Round, live: frozenset[int]) -> bool:
    """Claim a table to whose step nothing is missing, for the caller and nobody else to make it."""
    ready = not round_.stepping and bool(live) and live <= round_.arrived.keys()
    round_.stepping |= ready
    return ready


def _tell(store: TableStore, table: int, round_: _Round, trainers: tuple[int, ...]) -> Answer:
    """Tell trainers that a table has made its last step, with what has changed where they hold it."""
    changed = None
    if store.tells(table) and round_.before is not None:
        ids = round_.before.ids
        changed = pack_row_gradient(ids, store.read(table, ids).numpy())
    return Answer(table, round_.step, trainers, value=changed, of_table=True)


def _refresh(
    store: TableStore, table: int, round_: _Round, trainer: int, ahead: Sequence[NDArray[np.int64]]
) -> Answer:
    """Tell a trainer that a table has made its last step, with what has changed of rows that it has."""
    changed = np.zeros(0, dtype=np.int64) if round_.before is None else round_.before.ids
    asked = ahead[0] if len(ahead) == 1 else distinct_ids(np.concatenate(ahead))[0]
    ids = asked[find_among(asked, changed)[0]]
    rows = pack_row_gradient(ids, store.read(table, ids).numpy()) if ids.size else None
    return Answer(table, round_.step, (trainer,), value=rows, of_table=True)


def _with_rows_of(rows: Tensor, ids: NDArray[np.int64], before: RowGradients) -> Tensor:
    """Return rows with those of some ids replaced."""
    found, at = find_among(ids, before.ids)
    rows[torch.from_numpy(found)] = before.values[torch.from_numpy(at)]
    return rows
