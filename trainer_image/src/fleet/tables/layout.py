"""How a row lies in memory: values, optimizer state and marks side by side, in words of 32 bits."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.tables.config import TableConfig
from fleet.tables.saved import TableRows

__all__ = ["Layout"]


class Layout:
    """Where the parts of a table's rows lie. Words are float32[n, width], of any bits.

    Parameters
    ----------
    config : TableConfig
    """

    def __init__(self, config: TableConfig) -> None:
        self.dimension = config.dimension
        self._type = config.row_type
        self._options = {**config.rule.defaults(), **config.options}
        self._slots = config.rule.slots
        self.value_words = config.row_type.num_words(config.dimension)
        end = self.value_words
        self._columns: dict[str, slice] = {}
        for slot in config.rule.slots:
            begin, end = end, end + (config.dimension if slot.per_element else 1)
            self._columns[slot.name] = slice(begin, end)
        self._last = end
        """The column of the step of the last update, an int32."""
        names = [mark for policy in config.eviction for mark in policy.marks]
        self._marks = {name: end + 1 + number for number, name in enumerate(names)}
        self.width = end + 1 + len(names)

    def values(self, words: Tensor) -> Tensor:
        """Return the values of rows; float32[n, dimension], contiguous."""
        return self._type.unpack(words[:, : self.value_words], self.dimension).contiguous()

    def state(self, words: Tensor) -> dict[str, Tensor]:
        """Return copies of the optimizer state of rows, by slot; each contiguous, as arithmetic wants it."""
        return {name: words[:, columns].contiguous() for name, columns in self._columns.items()}

    def last(self, words: Tensor) -> NDArray[np.int32]:
        """Return the step of the last update of rows; int32[n]."""
        return words[:, self._last].numpy().view(np.int32)

    def marks(self, words: Tensor) -> dict[str, NDArray[np.float32]]:
        """Return what rules of eviction keep of rows; float32[n] by name."""
        return {name: words[:, column].numpy() for name, column in self._marks.items()}

    def table_rows(
        self, ids: NDArray[np.int64], words: Tensor, policies: Mapping[str, NDArray[Any]] | None = None
    ) -> TableRows:
        """Return rows as they are saved."""
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
        """Return rows as words.

        Parameters
        ----------
        values : float32[n, dimension]
            Rounded to what the type of the rows can store.
        state : mapping of name to float32[n, dimension] or float32[n, 1]
            Slots that are missing begin anew.
        last : int or int32[n]
        marks : mapping of name to float32[n]
            Those that are missing are 0.
        """
        words = torch.empty(len(values), self.width, dtype=torch.float32)
        words[:, : self.value_words] = self._type.pack(values)
        for slot in self._slots:
            begun = 0.0 if slot.initial_option is None else self._options[slot.initial_option]
            words[:, self._columns[slot.name]] = state.get(slot.name, torch.tensor(float(begun)))
        words.view(torch.int32)[:, self._last] = last
        for name, column in self._marks.items():
            words[:, column] = torch.as_tensor(marks.get(name, 0.0))
        return words

    def rounded(self, values: Tensor, ids: NDArray[np.int64], step: int, key: tuple[int, int]) -> Tensor:
        """Return values after an update as they can be stored."""
        return self._type.round_update(values, ids, step, key)

    def stored(self, values: Any) -> Tensor:
        """Return values as they are read after they were stored, each rounded to the nearest."""
        return self._type.unpack(self._type.pack(torch.as_tensor(values)), self.dimension)
