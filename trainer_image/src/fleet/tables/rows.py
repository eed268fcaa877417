"""Rows of a table with their state, as tensors to save and load, and as packed words in memory."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.config import Float32, TableConfig
from fleet.tables.ids import SHARDS, shard_of

__all__ = ["RowLayout", "TableRows", "join", "part", "rows_at", "warm_start"]


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of a table, with their state.

    Attributes
    ----------
    ids : int64[n]
    values : float32[n, dimension]
    state : mapping of name to float32[n, dimension] or float32[n, 1]
        By slot of the rule.
    marks : mapping of name to int32[n] or float32[n]
        ``last``, the step of each row's last update, and the marks of eviction rules.
    policies : mapping of name to array
        The state of the table's rules besides the rows, named ``admission.…`` and ``eviction.…``. The arrays
        of one rule have the same length, and its ``….ids`` or ``….shards`` identifies the owner of each
        entry.
    """

    ids: NDArray[np.int64]
    values: Tensor
    state: Mapping[str, Tensor]
    marks: Mapping[str, Tensor] = field(default_factory=dict)
    policies: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def part(rows: TableRows, shards: Collection[int]) -> TableRows:
    """Return the rows in some virtual shards, with their admission and eviction state."""
    wanted = np.zeros(SHARDS, dtype=np.bool_)
    wanted[list(shards)] = True
    policies = {}
    for name, array in rows.policies.items():
        rule = name.partition(".")[0]
        of = rows.policies.get(f"{rule}.shards")
        policies[name] = array[wanted[shard_of(rows.policies[f"{rule}.ids"]) if of is None else of]]
    return replace(rows_at(rows, np.flatnonzero(wanted[shard_of(rows.ids)])), policies=policies)


def rows_at(rows: TableRows, at: NDArray[np.int64]) -> TableRows:
    """Return the rows at the given positions, without admission and eviction state."""
    positions = torch.from_numpy(at)
    return TableRows(
        rows.ids[at],
        rows.values[positions],
        {name: entry[positions] for name, entry in rows.state.items()},
        {name: entry[positions] for name, entry in rows.marks.items()},
    )


def join(parts: Sequence[TableRows]) -> TableRows:
    """Concatenate disjoint sets of rows, sorted by id.

    Parameters
    ----------
    parts : sequence of TableRows
        At least one, all of one table.
    """
    ids = np.concatenate([each.ids for each in parts])
    order = np.argsort(ids)
    positions = torch.from_numpy(order)
    names = sorted({name for each in parts for name in each.policies})
    return TableRows(
        ids[order],
        torch.cat([each.values for each in parts])[positions],
        {name: torch.cat([each.state[name] for each in parts])[positions] for name in parts[0].state},
        {name: torch.cat([each.marks[name] for each in parts])[positions] for name in parts[0].marks},
        {
            name: np.concatenate([each.policies[name] for each in parts if name in each.policies])
            for name in names
        },
    )


def warm_start(config: TableConfig, ids: Any, vectors: Any) -> TableRows:
    """Build rows with pretrained vectors for `Table.load`; use `part` to select the rows of one server.

    Parameters
    ----------
    config : TableConfig
    ids : int[n]
        A tensor, an array or a list; distinct.
    vectors : float[n, dimension]

    Raises
    ------
    ConfigurationError
        An id is repeated, or the vectors have another shape or are not finite.
    """
    given, values = np.asarray(ids), torch.as_tensor(vectors)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ConfigurationError(
            f"table {config.name}: ids of type {given.dtype} and shape {list(given.shape)}, expected one "
            "dimension of whole numbers"
        )
    if values.shape != (expected := (given.size, config.dimension)):
        raise ConfigurationError(
            f"table {config.name}: vectors of shape {list(values.shape)}, expected {list(expected)}: a row "
            "for each id"
        )
    distinct, times = np.unique(given, return_counts=True)
    if distinct.size != given.size:
        raise ConfigurationError(
            f"table {config.name}: id {distinct[times > 1][0]} is given twice, expected each id once"
        )
    if not (finite := values.isfinite().all(dim=1)).all():
        at = int((~finite).nonzero()[0])
        raise ConfigurationError(
            f"table {config.name}: the vector of id {given[at]} at position {at} is not finite; expected "
            "finite numbers"
        )
    return TableRows(given.astype(np.int64), values.detach().to(torch.float32), {})


class RowLayout:
    """The layout of a row in 32-bit words: values, optimizer state, step of the last update, eviction marks.

    Words are float32[n, width] with any bits.

    Parameters
    ----------
    config : TableConfig
    """

    def __init__(self, config: TableConfig) -> None:
        self._dimension = config.dimension
        self._type = config.row_type
        self._options = {**config.rule.defaults(), **config.options}
        self._slots = config.rule.slots
        self.value_words = end = config.row_type.num_words(config.dimension)
        self.holds_values = type(config.row_type) is Float32
        """Whether the first words of a row are its values."""
        self._columns: dict[str, slice] = {}
        for slot in config.rule.slots:
            begin, end = end, end + (config.dimension if slot.per_element else 1)
            self._columns[slot.name] = slice(begin, end)
        self._last = end
        """The column of the last step, an int32."""
        names = [mark for policy in config.eviction for mark in policy.marks]
        self._marks = {name: end + 1 + number for number, name in enumerate(names)}
        self.width = end + 1 + len(names)

    def values(self, words: Tensor) -> Tensor:
        """Return the values of rows as contiguous float32[n, dimension]."""
        return self._type.unpack(words[:, : self.value_words], self._dimension).contiguous()

    def state(self, words: Tensor) -> dict[str, Tensor]:
        """Return copies of the optimizer state by slot, contiguous for fast arithmetic."""
        return {name: words[:, columns].contiguous() for name, columns in self._columns.items()}

    def last(self, words: Tensor) -> NDArray[np.int32]:
        """Return the step of each row's last update as int32[n]."""
        return words[:, self._last].numpy().view(np.int32)

    def marks(self, words: Tensor) -> dict[str, NDArray[np.float32]]:
        """Return the marks of the eviction rules by name, as float32[n]."""
        return {name: words[:, column].numpy() for name, column in self._marks.items()}

    def table_rows(
        self, ids: NDArray[np.int64], words: Tensor, policies: Mapping[str, NDArray[Any]] | None = None
    ) -> TableRows:
        """Convert packed words to rows that can be saved."""
        marks = {"last": self.last(words), **self.marks(words)}
        return TableRows(
            ids,
            self.values(words),
            self.state(words),
            {name: torch.from_numpy(mark.copy()) for name, mark in marks.items()},
            policies or {},
        )

    def words(
        self,
        values: Tensor,
        state: Mapping[str, Tensor],
        last: int | Tensor,
        marks: Mapping[str, NDArray[np.float32] | Tensor],
    ) -> Tensor:
        """Convert rows to packed words.

        Parameters
        ----------
        values : float32[n, dimension]
            Rounded to what the row type can store.
        state : mapping of name to float32[n, dimension] or float32[n, 1]
            Missing slots get their initial values.
        last : int or int32[n]
        marks : mapping of name to float32[n]
            Missing marks are 0.
        """
        words = torch.empty(len(values), self.width, dtype=torch.float32)
        words[:, : self.value_words] = self._type.pack(values)
        for slot in self._slots:
            initial = 0.0 if slot.initial_option is None else self._options[slot.initial_option]
            words[:, self._columns[slot.name]] = state.get(slot.name, torch.tensor(float(initial)))
        words.view(torch.int32)[:, self._last] = last
        for name, column in self._marks.items():
            words[:, column] = torch.as_tensor(marks.get(name, 0.0))
        return words
