"""An embedding table: look-ups, updates, admission and eviction of its rows.

A row exists from its first update, or from the time at which it was loaded, until it is evicted. Any other id
has its initial value, which is computed on demand, so reading uses no memory and changes nothing.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.config import TableConfig
from fleet.tables.eviction import Eviction, ShardRows, TouchedShards
from fleet.tables.first_values import generator_key
from fleet.tables.ids import SHARDS, shard_of
from fleet.tables.index import MISSING
from fleet.tables.kernels import is_plain
from fleet.tables.memory import RowMemory, TableStatistics
from fleet.tables.rows import RowLayout, TableRows
from fleet.tables.rules import RowRule, Rows, compiled_step
from fleet.tables.snapshot import RemovedIds, Snapshot

__all__ = ["Table"]


class Table:
    """An embedding table, or the part of it on one server. Not thread-safe.

    Parameters
    ----------
    config : TableConfig
    step : int
        Number of updates that the rows to be loaded have received.

    Attributes
    ----------
    statistics : TableStatistics
        Readable by any thread.
    removed : RemovedIds
        Ids that lost their rows since the last snapshot of the whole table.
    """

    def __init__(self, config: TableConfig, step: int = 0) -> None:
        self.config = config
        self._key = generator_key(config.seed, config.name)
        self._layout = RowLayout(config)
        self._memory = RowMemory(self._layout.width, config.num_embeddings, config.storage)
        self.statistics = TableStatistics(self._memory)
        self.removed = RemovedIds()
        self._candidates = config.admission.candidates(self._key) if config.admission else None
        self._touched = np.full(SHARDS, -1, dtype=np.int64)
        """By virtual shard, the step of its last update; kept only for eviction rules."""
        self._step = step
        """The highest step of any update."""
        self._snapshot: Snapshot | None = None
        self._loop = compiled_step(type(config.rule)) if self._layout.holds_values else None
        """The compiled loop whose results are bitwise identical to the rule's, or None."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._memory)

    @property
    def nbytes(self) -> int:
        """The memory used by rows, state, index, admission state and removed ids, in bytes."""
        candidates = self._candidates.nbytes if self._candidates else 0
        return self._memory.nbytes + self.removed.nbytes + candidates

    def look_up(self, ids: NDArray[np.int64], *, counted: bool = True) -> Tensor:
        """Return the values of ids without allocating rows.

        Parameters
        ----------
        ids : int64[n]
        counted : bool
            Whether `statistics` counts the look-up. Look-ups that trainers request are counted.

        Returns
        -------
        float32[n, dimension]
            A copy.

        Raises
        ------
        ConfigurationError
            An id is out of range.
        """
        words, missing = self._memory.read(ids, self._layout.value_words)
        values = words if self._layout.holds_values else self._layout.values(words)
        if missing is not None:
            self.config.check_ids(ids)  # an id out of range has no row
            values[torch.from_numpy(missing)] = self._first_values(ids[missing])
        if counted:
            self.statistics.looked_up += ids.size
            self.statistics.found += ids.size - (0 if missing is None else int(np.count_nonzero(missing)))
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
        """Update rows: admit new ids before the update, and evict rows after it.

        Parameters
        ----------
        ids : int64[n]
            Distinct.
        gradient : float32[n, dimension]
            Overwritten. The gradient of an id without a row that gets none is dropped.
        step : int
            Number of updates of the table, including this one.
        options : mapping, optional
            Options of this step; they take precedence over the table's.
        rule : RowRule, optional
            A rule without slots that replaces the table's rule for this update; the rows' state does not
            change.
        keeps : bool
            Whether to return the values before the update.

        Returns
        -------
        float32[n, dimension] or None
            The values that a look-up before the update would have returned.

        Raises
        ------
        ConfigurationError
            An id is out of range, or the gradient has another shape.
        """
        if gradient.shape != (expected := (ids.size, self.config.dimension)):
            raise ConfigurationError(
                f"table {self.config.name}: a gradient of shape {list(gradient.shape)}, expected "
                f"{list(expected)}: a row for each id"
            )
        # Ids out of range need no check here: they have no row, and then the loop steps nothing.
        if self._loop is not None and rule is None and self._is_stepped_at_once(gradient):
            now = {**self.config.options_at(step), **(options or {})}
            before = torch.empty_like(gradient) if keeps else None
            if self._memory.step(self._loop, ids, gradient, before, (now["lr"], now["weight_decay"], step)):
                self._step = max(self._step, step)
                return before
        self.config.check_ids(ids)
        self._step = max(self._step, step)
        rows = self._memory.find(ids)
        self._keep(rows)
        new = rows == MISSING
        kept = self._admit(ids, rows, new, step)
        rule, options = rule or self.config.rule, options or {}
        if kept is None:
            before = self._step_rows(ids, rows, new, gradient, step, options, rule, keeps)
        else:
            at = torch.from_numpy(kept)
            some = self._step_rows(ids[kept], rows[kept], new[kept], gradient[at], step, options, rule, keeps)
            before = None
            if some is not None:
                before = torch.empty_like(gradient)
                before[at], before[~at] = some, self._first_values(ids[~kept])
        if self.config.eviction:
            self._evict(ids, step)
        return before

    def load(self, loaded: TableRows) -> None:
        """Replace rows; missing optimizer state and eviction marks get their initial values.

        State of admission and eviction is replaced for the ids or shards that were saved.

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
        self._memory.store.write(rows, self._layout.words(loaded.values, loaded.state, last, loaded.marks))
        prefix = "admission."
        candidates = {
            name.removeprefix(prefix): array
            for name, array in loaded.policies.items()
            if name.startswith(prefix)
        }
        if self._candidates is not None and candidates:
            self._candidates.load(candidates)
        if "eviction.shards" in loaded.policies:
            self._touched[loaded.policies["eviction.shards"]] = loaded.policies["eviction.steps"]

    def remove(self, ids: NDArray[np.int64]) -> None:
        """Remove the rows of ids; ids without a row are ignored.

        Parameters
        ----------
        ids : int64[n]
            Distinct.

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
        """Return a copy of all rows, sorted by id, with optimizer, admission and eviction state."""
        ids, rows = self._memory.numbers.items()
        return self._layout.table_rows(ids, self._memory.store.read(rows), self._policies())

    def snapshot(self, since: int | None = None) -> Snapshot:
        """Begin a snapshot of the table's current state, which is read in parts while updates continue.

        Parameters
        ----------
        since : int, optional
            The step of an earlier snapshot, not older than the last one of the whole table. Only rows that
            were updated after it are included, and the ids that lost their rows since.

        Returns
        -------
        Snapshot
            Iterate over its ``parts`` to the end, or close it, before the next one is made.

        Raises
        ------
        ConfigurationError
            Another snapshot is in progress, or the ids that lost their rows since that step are not known.
        """
        if self._snapshot is not None and not self._snapshot.is_done:
            raise ConfigurationError(
                f"table {self.config.name}: a snapshot of step {self._snapshot.step} is still in progress; "
                "read its parts to the end, or close it, before the next snapshot"
            )
        removed = None
        if since is None:
            self.removed.begin(self._step, len(self))
        else:
            removed = self.removed.since(since, self._memory, self.config.name)
        self._snapshot = Snapshot(self._memory, self._layout, self._step, self._policies(), since, removed)
        return self._snapshot

    def _is_stepped_at_once(self, gradient: Tensor) -> bool:
        """Return whether compiled code may update existing rows without further processing."""
        return (
            self._memory.is_in_memory
            and not self.config.eviction
            and (self._snapshot is None or self._snapshot.is_done)
            and is_plain(gradient, torch.float32)
        )

    def _admit(
        self, ids: NDArray[np.int64], rows: NDArray[np.int64], new: NDArray[np.bool_], step: int
    ) -> NDArray[np.bool_] | None:
        """Allocate uninitialized rows for the ids that are admitted now.

        Parameters
        ----------
        ids : int64[n]
        rows : int64[n]
            `MISSING` for ids without a row; overwritten with the new numbers.
        new : bool[n]
            True for ids without a row; overwritten: True for ids that got one.
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
        # A snapshot may have yet to read these numbers, under which it must find no row.
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
        keeps: bool,
    ) -> Tensor | None:
        """Update existing rows; if `keeps` is True, return their previous values."""
        first = self._layout.words(self._first_values(ids[new]), {}, step, {}) if new.any() else None
        words = self._read(rows, new, first)
        values, state = self._layout.values(words), self._layout.state(words)
        before = values.clone() if keeps else None
        try:
            rule.step(Rows(values, gradient, state), {**self.config.options_at(step), **options}, step)
        except BaseException:
            # New rows are already in the index: if the step raises, they must not read as uninitialized
            # memory.
            if first is not None:
                self._memory.store.write(rows[new], first)
            raise
        marks, last = self._layout.marks(words), self._layout.last(words)
        new_marks: dict[str, NDArray[np.float32]] = {}
        for policy in self.config.eviction:
            new_marks |= policy.touch(marks, last, step)
        values = self.config.row_type.round_update(values, ids, step, self._key)
        self._memory.store.write(rows, self._layout.words(values, state, step, new_marks))
        return before

    def _read(self, rows: NDArray[np.int64], new: NDArray[np.bool_], first: Tensor | None) -> Tensor:
        """Return the packed words of rows; the words of new rows come from `first`."""
        if first is None:
            return self._memory.store.read(rows)
        words, at = first.new_empty(rows.size, first.shape[1]), torch.from_numpy(new)
        words[at] = first
        if not new.all():
            words[~at] = self._memory.store.read(rows[~new])
        return words

    def _first_values(self, ids: NDArray[np.int64]) -> Tensor:
        """Return initial values, rounded to values that the row type can store."""
        row_type, dimension = self.config.row_type, self.config.dimension
        values = self.config.first_values.of(ids, dimension, self._key)
        # The values are rounded as if stored, so that a look-up does not change when the id gets its row.
        return row_type.unpack(row_type.pack(torch.from_numpy(values)), dimension)

    def _evict(self, ids: NDArray[np.int64], step: int) -> None:
        """Apply each eviction rule to the updated shards; each rule sees the rows that earlier rules kept."""
        shards = np.flatnonzero(np.bincount(shard_of(ids), minlength=SHARDS))
        for policy in self.config.eviction:
            touched = TouchedShards(shards, self._memory.num_rows[shards], self._touched[shards])
            if (due := policy.due(touched, step)).any():
                self.remove(self._leaving(policy, shards[due], step))
        # This comes last, because the rules compare with the previous update of each shard.
        self._touched[shards] = step

    def _leaving(self, policy: Eviction, shards: NDArray[np.int64], step: int) -> NDArray[np.int64]:
        leaving = []
        for shard, ids, rows in self._memory.rows_of_shards(shards):
            words = self._memory.store.read(rows)
            of_shard = ShardRows(shard, ids, self._layout.last(words), self._layout.marks(words))
            leaving.append(ids[policy.leaving(of_shard, step)])
        return np.concatenate(leaving)

    def _keep(self, rows: NDArray[np.int64], *, existed: bool = True) -> None:
        """Copy rows into the current snapshot, if any, before their content changes."""
        if self._snapshot is not None and not self._snapshot.is_done:
            self._snapshot.keep(rows, existed=existed)

    def _policies(self) -> dict[str, NDArray[Any]]:
        """Return copies of the admission and eviction state; see `TableRows`."""
        policies = {}
        if self._candidates is not None:
            policies = {f"admission.{name}": array for name, array in self._candidates.saved().items()}
        if self.config.eviction:
            shards = np.flatnonzero(self._touched >= 0)
            policies |= {"eviction.shards": shards, "eviction.steps": self._touched[shards]}
        return policies
