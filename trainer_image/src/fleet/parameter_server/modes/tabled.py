"""A server's half for a job with tables: the dense one and that of tables, which keep step together."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleet.parameter_server.modes.interface import (
    Answer,
    Missing,
    Mode,
    ResumesEach,
    ServerMode,
    TableServer,
    Work,
)
from fleet.parameter_server.receive_buffers import Turn
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.arena import LazyBytes
from fleet.tables import RowGradients
from fleet.wire import HyperParameters

__all__ = ["TabledServer", "with_tables"]


def with_tables(mode: Mode, shard: Shard, num_trainers: int) -> ServerMode:
    """Build a mode's half of one server, with its tables if there are some.

    Raises
    ------
    ConfigurationError
        There are tables, and the mode knows none.
    """
    dense = mode.make_server(shard, num_trainers)
    if not len(shard.tables):
        return dense
    tables = mode.make_tables(shard.tables, num_trainers)
    made = TabledEach if isinstance(dense, ResumesEach) else TabledServer
    return made(dense, tables, has_blocks=bool(shard.blocks))


class TabledServer:
    """Both halves of one server; see `ServerMode`.

    Parameters
    ----------
    dense : ServerMode
    tables : TableServer
    has_blocks : bool
        Whether this server has dense blocks, so that their steps count.
    """

    def __init__(self, dense: ServerMode, tables: TableServer, *, has_blocks: bool) -> None:
        self._dense = dense
        self._tables = tables
        self._has_blocks = has_blocks

    @property
    def step(self) -> int:
        """How far the training is: blocks and tables."""
        return min(self._dense.step, self._tables.step) if self._has_blocks else self._tables.step

    def step_of(self, trainer: int) -> int:
        """Return the step that a trainer makes next, with all of what it sends."""
        of_tables = self._tables.step_of(trainer)
        return min(self._dense.step_of(trainer), of_tables) if self._has_blocks else of_tables

    def resume(self, step: int) -> None:
        """Go on at a step that a checkpoint holds."""
        self._dense.resume(step)
        self._tables.resume(step)

    def admit(self, trainer: int, incarnation: int = 0) -> None:
        """Begin anew with a trainer."""
        self._dense.admit(trainer, incarnation)
        self._tables.admit(trainer, incarnation)

    def pull(self, trainer: int, step: int) -> Sequence[Answer]:
        """Return the value of every block; rows are looked up as they are needed."""
        return self._dense.pull(trainer, step)

    def turn(self, trainer: int, block: int) -> Turn:
        """Return when a gradient is used that is about to land."""
        return self._dense.turn(trainer, block)

    def value(self, trainer: int, block: int) -> memoryview | LazyBytes | None:
        """Return the bytes of a block's value; None for its own."""
        return self._dense.value(trainer, block)

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Take the hyper-parameters of a trainer's step."""
        self._dense.begin(trainer, step, hyper_parameters)
        self._tables.begin(trainer, step, hyper_parameters)

    def gradient(self, trainer: int, block: int, step: int) -> Sequence[Answer] | Work:
        """Take a block's gradient that has landed."""
        return self._dense.gradient(trainer, block, step)

    def look_up(self, trainer: int, table: int, step: int, ids: NDArray[np.int64]) -> Tensor:
        """Return rows; see `TableServer.look_up`."""
        return self._tables.look_up(trainer, table, step, ids)

    def row_gradient(
        self, trainer: int, table: int, step: int, gradient: RowGradients
    ) -> Sequence[Answer] | Work:
        """Take a table's gradient; see `TableServer.gradient`."""
        return self._tables.gradient(trainer, table, step, gradient)

    def end(self, trainer: int, step: int, absent: Sequence[int]) -> Sequence[Answer]:
        """Take a trainer's word that nothing more comes."""
        self._tables.end(trainer, step)
        return self._dense.end(trainer, step, absent)

    def complete(self, trainer: int) -> Sequence[Answer]:
        """Go on without a trainer."""
        return [*self._dense.complete(trainer), *self._tables.complete(trainer)]

    def missing(self) -> Missing | None:
        """Return what the step in progress waits for; of blocks, else of tables."""
        return self._dense.missing() or self._tables.missing()


class TabledEach(TabledServer):
    """Both halves where trainers are not in step; see `ResumesEach`."""

    def resume_each(self, steps: Mapping[int, int]) -> None:
        """Go on with these trainers at these steps."""
        for half in (self._dense, self._tables):
            if isinstance(half, ResumesEach):
                half.resume_each(steps)
