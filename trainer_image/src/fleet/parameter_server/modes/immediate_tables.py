"""Tables in the modes without a barrier: each gradient steps its rows when it comes, and nobody waits."""

import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.modes.interface import Answer, Missing
from fleet.parameter_server.modes.noted import note
from fleet.parameter_server.modes.trainer_steps import TrainerSteps
from fleet.parameter_server.table_store import RowUpdate, TableStore
from fleet.tables import RowGradients
from fleet.tables.kernels import distinct_ids
from fleet.wire import NO_STEP, HyperParameters
from fleet.wire.rows import pack_row_gradient

__all__ = ["ImmediateTables"]


class ImmediateTables:
    """The tables of one server in a mode without a barrier; see `TableServer`.

    Parameters
    ----------
    store : TableStore
    num_trainers : int
        How many trainers take part from the beginning; others may be admitted later.
    adds : bool
        Whether what comes is added to rows, and its trainer is told of these, as in GEO.
    """

    def __init__(self, store: TableStore, num_trainers: int, *, adds: bool = False) -> None:
        self._store = store
        self._adds = adds
        self._steps = TrainerSteps(store.names, num_trainers)
        self._untold: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
        """Ids of rows that have changed since a trainer was told, by it and table that it holds too."""
        self._telling = threading.Lock()
        """Guards them: trainers send at once."""

    @property
    def step(self) -> int:
        """The number of steps that the trainer which is ahead has made."""
        return self._steps.ahead

    def step_of(self, trainer: int) -> int:
        """Return the step that a trainer makes next; see `TrainerSteps`, as for what follows."""
        return self._steps.of(trainer)

    def resume(self, step: int) -> None:
        """Go on at a step that a checkpoint holds."""
        self._steps.resume(step)

    def resume_each(self, steps: Mapping[int, int]) -> None:
        """Go on with these trainers at these steps."""
        self._steps.resume_each(steps)

    def admit(self, trainer: int, incarnation: int) -> None:
        """Begin anew with a trainer; what its earlier life has sent is applied already."""
        with self._telling:  # from here on: it looks all rows up
            self._untold.update(
                {
                    (trainer, each): []
                    for each in self._store.names
                    if self._store.tells(each) and not self._adds
                }
            )
        self._steps.admit(trainer, incarnation)

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Take the hyper-parameters of a trainer's step; other trainers may have others."""
        del step
        self._steps.hyper[trainer] = hyper_parameters

    def look_up(self, trainer: int, table: int, step: int, ids: NDArray[np.int64]) -> Tensor:
        """Return the present rows, whatever step the trainer is at."""
        del trainer, step
        return self._store.look_up(table, ids)

    def gradient(self, trainer: int, table: int, step: int, gradient: RowGradients) -> Sequence[Answer]:
        """Apply a gradient, unless an earlier life of the trainer has brought this step's.

        Raises
        ------
        FleetError
            An id is none of the table's, or it could not be applied; see `TableStore.apply`.
        """
        self._store.check(table, gradient.ids)
        if self._steps.is_due(trainer, table, step):
            hyper = self._steps.hyper[trainer]
            if hyper != NO_STEP or self._adds:
                origin = self._steps.origin(trainer, step)
                self._store.apply(RowUpdate(table, gradient, hyper, (origin,)))
            self._steps.advance(trainer, table, step)
        told = self._told(trainer, table, gradient.ids)
        return [Answer(table, step + 1, (trainer,), value=told, of_table=True)]

    def _told(self, trainer: int, table: int, ids: NDArray[np.int64]) -> memoryview | None:
        """Return the rows that a trainer is told of which has sent these, if it is told of any."""
        if self._adds:
            return pack_row_gradient(ids, self._store.read(table, ids).numpy())
        return self._changed(trainer, table, ids) if self._store.tells(table) else None

    def _changed(self, trainer: int, table: int, ids: NDArray[np.int64]) -> memoryview:
        """Return the rows that have changed since a trainer was told last, after it has sent some itself."""
        with self._telling:
            for (_, of), untold in self._untold.items():
                if of == table:
                    note(untold, ids)
            told = self._untold.get((trainer, table), [])
            parts = [ids, *told]
            told.clear()
        changed, _ = distinct_ids(np.concatenate(parts))
        self._store.check_told(table, changed.size)
        return pack_row_gradient(changed, self._store.read(table, changed).numpy())

    def end(self, trainer: int, step: int) -> None:
        """Check that a trainer which ends a step has sent every table's gradient."""
        if open_ := [
            self._store.names[table] for table, made in self._steps.parts(trainer).items() if made <= step
        ]:
            raise RemoteProtocolError(
                f"trainer {trainer} ends step {step} without a gradient of table {', '.join(open_[:3])}; "
                "expected one of each table, an empty one where no row has any"
            )

    def complete(self, trainer: int) -> Sequence[Answer]:
        """Go on without a trainer; nobody has waited for it."""
        with self._telling:
            for key in [key for key in self._untold if key[0] == trainer]:
                del self._untold[key]
        return ()

    def missing(self) -> Missing | None:
        """Return None: nobody is waited for.

        Raises
        ------
        FleetError
            A gradient could not be applied.
        """
        self._store.failed.check()
        return None
