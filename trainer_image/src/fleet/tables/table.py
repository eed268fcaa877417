"""Rows of one table: what is looked up, and how updates change it.

A row exists once it was updated or loaded, and until it is evicted. Otherwise it is read as its first value,
which the generator gives, so reading costs no memory and changes nothing.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.config import TableConfig
from fleet.tables.evictor import Evictor
from fleet.tables.first_values import generator_key
from fleet.tables.index import MISSING
from fleet.tables.layout import Layout
from fleet.tables.memory import RowMemory
from fleet.tables.removed import RemovedIds
from fleet.tables.rules import RowRule, Rows
from fleet.tables.saved import TableRows
from fleet.tables.snapshot import Snapshot
from fleet.tables.statistics import TableStatistics

__all__ = ["Table", "TableConfig", "TableRows"]


class Table:
    """The rows of one table that have been updated. Not to be called by two threads at once.

    Parameters
    ----------
    config : TableConfig
    step : int
        How many updates it has had that are not to be seen: rows come by `load`.
    """

    def __init__(self, config: TableConfig, step: int = 0) -> None:
        self.config = config
        self._key = generator_key(config.seed, config.name)
        self._layout = Layout(config)
        self._memory = RowMemory(self._layout.width, config.num_embeddings, config.storage)
        self.statistics = TableStatistics(self._memory)
        self._candidates = config.admission.candidates(self._key) if config.admission else None
        self._evictor = Evictor(config.eviction, self._memory, self._layout, self.remove)
        self._step = step
        """The newest step of an update."""
        self.removed = RemovedIds()
        """What has gone since the last snapshot of all rows."""
        self._snapshot: Snapshot | None = None

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._memory)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rows, their state and the index take, and what is remembered of other ids."""
        of_others = self.removed.nbytes + (self._candidates.nbytes if self._candidates else 0)
        return self._memory.nbytes + of_others

    def look_up(self, ids: NDArray[np.int64], *, counted: bool = True) -> Tensor:
        """Return the values of ids. Nothing is admitted or stored.

        Parameters
        ----------
        ids : int64[n]
        counted : bool
            Whether `statistics` counts it, as it does where a trainer asks.

        Returns
        -------
        float32[n, dimension]
            A copy.

        Raises
        ------
        ConfigurationError
            An id is out of range.
        """
        self.config.check_ids(ids)
        rows = self._memory.find(ids)
        new = rows == MISSING
        num_new = int(np.count_nonzero(new))
        if counted:
            self.statistics.count(ids.size, ids.size - num_new)
        words = self._memory.read(np.where(new, 0, rows) if num_new else rows, self._layout.value_words)
        values = self._layout.values(words)
        if num_new:
            values[torch.from_numpy(new)] = self._first_values(ids[new])
        return values

    def update(
        self,
        ids: NDArray[np.int64],
        gradient: Tensor,
        step: int,
        options: Mapping[str, Any] | None = None,
        *,
        rule: RowRule | None = None,
        keeps: bool = False,
    ) -> Tensor | None:
        """Step rows; admit and evict as the table's rules say.

        Parameters
        ----------
        ids : int64[n]
            None of them twice.
        gradient : float32[n, dimension]
            Overwritten. That of an id that has no row and gets none is dropped.
        step : int
            How many updates the table has had, this one included.
        options : mapping, optional
            Of this step; the table's own stand where it has none.
        rule : RowRule, optional
            What steps rows this once, without any slots, in place of the table's; their state stays.
        keeps : bool
            Whether to return the rows as they were.

        Returns
        -------
        float32[n, dimension] or None
            What a look-up would have given.

        Raises
        ------
        ConfigurationError
            An id is out of range, or the gradient is of another shape.
        """
        self.config.check_ids(ids)
        if gradient.shape != (expected := (ids.size, self.config.dimension)):
            raise ConfigurationError(
                f"table {self.config.name}: a gradient of shape {list(gradient.shape)}, expected "
                f"{list(expected)}: a row for each id"
            )
        self._step = max(self._step, step)
        rows = self._memory.find(ids)
        self._keep(rows)
        new = rows == MISSING
        kept = self._admit(ids, rows, new, step)
        before = torch.empty_like(gradient) if keeps else None
        rule = rule or self.config.rule
        if kept is None:
            self._step_rows(ids, rows, new, gradient, step, options or {}, rule, before)
        else:
            at = torch.from_numpy(kept)
            some = gradient.new_empty(int(at.sum()), self.config.dimension) if keeps else None
            self._step_rows(ids[kept], rows[kept], new[kept], gradient[at], step, options or {}, rule, some)
            if before is not None and some is not None:
                before[at], before[~at] = some, self._first_values(ids[~kept])
        self._evictor.evict(ids, step)
        return before

    def load(self, loaded: TableRows) -> None:
        """Put rows in the place of those of their ids; slots and marks that are not given begin anew.

        What the table's rules remember is put in the place of what they remember of the same ids or shards.

        Parameters
        ----------
        loaded : TableRows
            The rows, and what was saved with them.

        Raises
        ------
        ConfigurationError
            An id is out of range.
        """
        self.config.check_ids(loaded.ids)
        rows = self._memory.find(loaded.ids)
        self._keep(rows)
        new = rows == MISSING
        rows[new] = self._memory.add(loaded.ids[new])
        self._keep(rows[new], existed=False)
        last = loaded.marks.get("last", self._step)
        self._memory.write(rows, self._layout.words(loaded.values, loaded.state, last, loaded.marks))
        for rule, found in self._remembering().items():
            names = {name for name in loaded.policies if name.startswith(f"{rule}.")}
            if names:
                found.load({name.removeprefix(f"{rule}."): loaded.policies[name] for name in names})

    def remove(self, ids: NDArray[np.int64]) -> None:
        """Forget the rows of ids; those that have none are passed over.

        Parameters
        ----------
        ids : int64[n]
            None of them twice.

        Raises
        ------
        ConfigurationError
            An id is out of range.
        """
        self.config.check_ids(ids)
        self._keep(self._memory.find(ids))
        self.removed.add(ids, self._step)
        self._memory.remove(ids)

    def rows(self) -> TableRows:
        """Return a copy of all rows, by ascending id, with their state and what the rules remember."""
        ids, rows = self._memory.items()
        return self._layout.table_rows(ids, self._memory.read(rows), self._policies())

    def snapshot(self, since: int | None = None) -> Snapshot:
        """Begin to save the table as of now, part by part, while updates go on.

        Parameters
        ----------
        since : int, optional
            Only rows that were updated after this step, and the ids whose rows have gone since: the step of a
            snapshot, not older than the last one of the whole table.

        Returns
        -------
        Snapshot
            To be iterated by its ``parts`` to the end, or closed, before the next one is made.

        Raises
        ------
        ConfigurationError
            Another one is still under way, or which rows have gone since that step is not known.
        """
        if self._snapshot is not None and not self._snapshot.is_done:
            raise ConfigurationError(
                f"table {self.config.name}: a snapshot of step {self._snapshot.step} is still under way; "
                "expected that its parts are read to the end, or that it is closed, before the next"
            )
        removed = None
        if since is None:
            self.removed.begin(self._step, len(self))
        else:
            removed = self.removed.since(since, self._memory, self.config.name)
        self._snapshot = Snapshot(self._memory, self._layout, self._step, self._policies(), since, removed)
        return self._snapshot

    def _admit(
        self, ids: NDArray[np.int64], rows: NDArray[np.int64], new: NDArray[np.bool_], step: int
    ) -> NDArray[np.bool_] | None:
        """Give rows to those ids without one that get one now; nothing is written to them yet.

        Parameters
        ----------
        ids : int64[n]
        rows : int64[n]
            `MISSING` where there is none; overwritten where there is one now.
        new : bool[n]
            Which have none; overwritten with which have one only now.
        step : int

        Returns
        -------
        bool[n] or None
            Which ids have a row; None if all do.
        """
        if not new.any():
            return None
        kept = None
        if self._candidates is not None:
            admitted = self._candidates.admit(ids[new], step)
            kept = ~new
            kept[new] = admitted
            new &= kept
        rows[new] = self._memory.add(ids[new])
        self._keep(rows[new], existed=False)
        return kept

    def _step_rows(
        self,
        ids: NDArray[np.int64],
        rows: NDArray[np.int64],
        new: NDArray[np.bool_],
        gradient: Tensor,
        step: int,
        options: Mapping[str, Any],
        rule: RowRule,
        before: Tensor | None,
    ) -> None:
        first = self._layout.words(self._first_values(ids[new]), {}, step, {}) if new.any() else None
        words = _words(self._memory, rows, new, first)
        values, state = self._layout.values(words), self._layout.state(words)
        if before is not None:
            before.copy_(values)
        try:
            rule.step(Rows(values, gradient, state), {**self.config.options_at(step), **options}, step)
        except BaseException:
            if first is not None:  # the rows are there
                self._memory.write(rows[new], first)
            raise
        marks = self._evictor.touch(self._layout.marks(words), self._layout.last(words), step)
        values = self._layout.rounded(values, ids, step, self._key)
        self._memory.write(rows, self._layout.words(values, state, step, marks))

    def _first_values(self, ids: NDArray[np.int64]) -> Tensor:
        values = self.config.first_values.of(ids, self.config.dimension, self._key)
        return self._layout.stored(torch.from_numpy(values))

    def _keep(self, rows: NDArray[np.int64], *, existed: bool = True) -> None:
        """Set aside for a snapshot what is about to change; new rows may have the numbers of others."""
        if self._snapshot is not None and not self._snapshot.is_done:
            self._snapshot.keep(rows, existed=existed)

    def _policies(self) -> dict[str, NDArray[Any]]:
        """Return copies of what the table's rules remember, as in `TableRows`."""
        return {
            f"{rule}.{name}": array
            for rule, found in self._remembering().items()
            for name, array in found.saved().items()
        }

    def _remembering(self) -> dict[str, Any]:
        """Return what remembers more than rows, by the prefix under which it is saved."""
        found: dict[str, Any] = {"eviction": self._evictor}
        return found if self._candidates is None else {"admission": self._candidates, **found}


def _words(
    memory: RowMemory, rows: NDArray[np.int64], new: NDArray[np.bool_], first: Tensor | None
) -> Tensor:
    """Return the words of rows, of new ones those with which they begin."""
    if first is None:
        return memory.read(rows)
    words, at = first.new_empty(rows.size, first.shape[1]), torch.from_numpy(new)
    words[at] = first
    if not new.all():
        words[~at] = memory.read(rows[~new])
    return words
