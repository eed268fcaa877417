"""Rows of one table: what is looked up, and how updates change it.

A row exists once it was updated or loaded. Before that it is read as its first value, which the generator
gives, so reading costs no memory and changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.first_values import FirstValues, Normal, generator_key
from fleet.tables.index import MISSING, RowIndex
from fleet.tables.rules import RowRule, Rows

__all__ = ["Table", "TableConfig", "TableRows"]

_GROWTH: Final = 1.125
"""By how much the memory of rows grows: resized in place, by pages, it needs no second copy."""
_LEAST_ROWS: Final = 64


@dataclass(frozen=True)
class TableConfig:
    """What a table is.

    Attributes
    ----------
    name : str
    dimension : int
        Elements of a row.
    rule : RowRule
        What an update does to a row.
    num_embeddings : int, optional
        Ids are below it and not negative; without it any 64-bit id is one.
    first_values : FirstValues
    seed : int
    options : mapping
        What the rule's `defaults` are replaced by.

    Raises
    ------
    ConfigurationError
        The dimension or the number of embeddings is not positive, or the rule has no such option.
    """

    name: str
    dimension: int
    rule: RowRule
    num_embeddings: int | None = None
    first_values: FirstValues = field(default_factory=Normal)
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, value in (("dimension", self.dimension), ("num_embeddings", self.num_embeddings)):
            if value is not None and value < 1:
                raise ConfigurationError(f"table {self.name}: {what} is {value}, expected at least 1")
        if unknown := sorted(set(self.options).difference(self.rule.defaults())):
            raise ConfigurationError(
                f"table {self.name}: {type(self.rule).__name__} has no option {', '.join(unknown)}; "
                f"expected some of {', '.join(self.rule.defaults())}"
            )


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows with their state.

    Attributes
    ----------
    ids : int64[n]
    values : float32[n, dimension]
    state : mapping of name to float32[n, dimension] or float32[n, 1]
        By slot of the rule.
    """

    ids: NDArray[np.int64]
    values: Tensor
    state: Mapping[str, Tensor]


class Table:
    """The rows of one table that have been updated. Not to be called by two threads at once.

    Parameters
    ----------
    config : TableConfig
    """

    def __init__(self, config: TableConfig) -> None:
        self.config = config
        self._key = generator_key(config.seed, config.name)
        self._options = {**config.rule.defaults(), **config.options}
        self._index = RowIndex()
        self._columns, width = _columns(config)
        self._memory = np.zeros((_LEAST_ROWS, width), dtype=np.float32)
        """A row and its state side by side, as an update needs them."""

    def __len__(self) -> int:
        """Return how many rows have been updated or loaded."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rows, their state and the index take."""
        return self._memory.nbytes + self._index.nbytes

    def look_up(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the values of ids.

        Parameters
        ----------
        ids : int64[n]

        Returns
        -------
        float32[n, dimension]
            A copy.

        Raises
        ------
        ConfigurationError
            An id is out of range.
        """
        self._check(ids)
        rows = self._index.find(ids)
        new = rows == MISSING
        has_new = bool(new.any())
        existing = torch.from_numpy(np.where(new, 0, rows) if has_new else rows)
        memory = torch.from_numpy(self._memory)
        values = torch.index_select(memory[:, : self.config.dimension], 0, existing)
        if has_new:
            values[torch.from_numpy(new)] = torch.from_numpy(self._first_values(ids[new]))
        return values

    def update(
        self, ids: NDArray[np.int64], gradient: Tensor, step: int, options: Mapping[str, Any] | None = None
    ) -> None:
        """Step rows.

        Parameters
        ----------
        ids : int64[n]
            None of them twice.
        gradient : float32[n, dimension]
            Overwritten.
        step : int
            How many updates the table has had, this one included.
        options : mapping, optional
            Of this step; the table's own stand where it has none.

        Raises
        ------
        ConfigurationError
            An id is out of range, or the gradient is of another shape.
        """
        self._check(ids)
        if gradient.shape != (expected := (ids.size, self.config.dimension)):
            raise ConfigurationError(
                f"table {self.config.name}: a gradient of shape {list(gradient.shape)}, expected "
                f"{list(expected)}: a row for each id"
            )
        rows = self._rows_of(ids)
        values, state = self._copy(rows)
        self.config.rule.step(Rows(values, gradient, state), {**self._options, **(options or {})}, step)
        parts = [values, *state.values()]
        self._memory[rows] = torch.cat(parts, dim=1).numpy() if state else values.numpy()

    def load(self, loaded: TableRows) -> None:
        """Put rows in the place of those of their ids; slots that are not given begin anew."""
        self._check(loaded.ids)
        rows = self._rows_of(loaded.ids)
        self._memory[rows] = self._begun(loaded.values.numpy())
        for name, entry in loaded.state.items():
            self._memory[rows, self._columns[name]] = entry.numpy()

    def rows(self) -> TableRows:
        """Return a copy of all rows that have been updated or loaded, by ascending id."""
        ids, rows = self._index.items()
        return TableRows(ids, *self._copy(rows))

    def _check(self, ids: NDArray[np.int64]) -> None:
        limit = self.config.num_embeddings
        if limit is None or ids.size == 0:
            return
        # As unsigned numbers the negative ones lie above every limit, so one comparison finds both.
        if int(ids.view(np.uint64).max()) >= limit:
            at = int(np.flatnonzero(ids.view(np.uint64) >= np.uint64(limit))[0])
            raise ConfigurationError(
                f"table {self.config.name}: id {ids[at]} at position {at}, expected 0 to {limit - 1}"
            )

    def _rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of ids; those that are new begin with their first values."""
        rows, new = self._index.find_or_add(ids)
        if self._index.end > len(self._memory):
            size = max(self._index.end, int(len(self._memory) * _GROWTH))
            self._memory.resize((size, self._memory.shape[1]), refcheck=False)
        if new.any():
            self._memory[rows[new]] = self._begun(self._first_values(ids[new]))
        return rows

    def _first_values(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.config.first_values.of(ids, self.config.dimension, self._key)

    def _begun(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return rows of these values with the state of rows that were never updated."""
        begun = np.zeros((len(values), self._memory.shape[1]), dtype=np.float32)
        begun[:, : self.config.dimension] = values
        for slot in self.config.rule.slots:
            if slot.initial_option is not None:
                begun[:, self._columns[slot.name]] = self._options[slot.initial_option]
        return begun

    def _copy(self, rows: NDArray[np.int64]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return copies of rows: values, and state by slot; each contiguous, as arithmetic wants it."""
        whole = torch.index_select(torch.from_numpy(self._memory), 0, torch.from_numpy(rows))
        state = {name: whole[:, columns].contiguous() for name, columns in self._columns.items()}
        return whole[:, : self.config.dimension].contiguous(), state


def _columns(config: TableConfig) -> tuple[dict[str, slice], int]:
    """Return where each slot of a row lies, and how wide a row is with all of them."""
    columns, end = {}, config.dimension
    for slot in config.rule.slots:
        width = config.dimension if slot.per_element else 1
        columns[slot.name] = slice(end, end + width)
        end += width
    return columns, end
