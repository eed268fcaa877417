"""The configuration of a table, and the types of its rows.

All servers and trainers of a job agree on one configuration. A row type defines how values are stored; a
user-defined type has the members of `RowType`. Optimizer state is always float32.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.tables.admission import Admission
from fleet.tables.eviction import Eviction
from fleet.tables.first_values import FirstValues, Normal
from fleet.tables.philox import ROUNDING, random_words
from fleet.tables.rules import RowRule, steps_every_row
from fleet.tables.storage import IN_MEMORY, Storage

__all__ = ["BFloat16", "Float32", "RowType", "TableConfig"]


class RowType(Protocol):
    """A format for the values of a row, which are stored in 32-bit words."""

    def num_words(self, dimension: int) -> int:
        """Return the number of 32-bit words in a row.

        Parameters
        ----------
        dimension : int
            Number of values of a row.

        Returns
        -------
        int
            Words of 32 bits.
        """

    def unpack(self, words: Tensor, dimension: int) -> Tensor:
        """Unpack values from words, and return them as float32[n, dimension].

        Parameters
        ----------
        words : float32[n, num_words]
            Any bits; each row is contiguous. If words and values are the same, `words` itself is returned.
        dimension : int
        """

    def pack(self, values: Tensor) -> Tensor:
        """Convert values to words, rounding each value to the nearest that the row type can store.

        Parameters
        ----------
        values : float32[n, dimension]
            The rows.

        Returns
        -------
        float32[n, num_words]
            Any bits.
        """

    def round_update(self, values: Tensor, ids: NDArray[np.int64], step: int, key: tuple[int, int]) -> Tensor:
        """Return updated values, rounded to values that the row type can store: float32[n, dimension].

        Parameters
        ----------
        values : float32[n, dimension]
        ids : int64[n]
        step : int
        key : two int
            The table's `generator_key`.
        """


@dataclass(frozen=True)
class Float32:
    """Single-precision values, stored unchanged."""

    def num_words(self, dimension: int) -> int:
        """Return the number of 32-bit words in a row; see `RowType.num_words`."""
        return dimension

    def unpack(self, words: Tensor, dimension: int) -> Tensor:
        """Return the words unchanged, because each word is a value; see `RowType.unpack`."""
        del dimension
        return words

    def pack(self, values: Tensor) -> Tensor:
        """Return the values unchanged, because each value is a word; see `RowType.pack`."""
        return values

    def round_update(self, values: Tensor, ids: NDArray[np.int64], step: int, key: tuple[int, int]) -> Tensor:
        """Return the values unchanged; see `RowType.round_update`."""
        del ids, step, key
        return values


@dataclass(frozen=True)
class BFloat16:
    """Values rounded to bfloat16, with 8 bits of precision and half the memory. Rules compute in float32.

    Attributes
    ----------
    stochastic : bool
        True: an update rounds up with the probability that makes the mean exact, so that steps below the
        precision add up over time. The draw is a function of the table, the id, the column and the step.
        False: an update rounds to nearest, ties to even, as initial and loaded values always do.
    """

    stochastic: bool = False

    def num_words(self, dimension: int) -> int:
        """Return the number of words, each of which contains two values; see `RowType.num_words`."""
        return (dimension + 1) // 2

    def unpack(self, words: Tensor, dimension: int) -> Tensor:
        """Unpack values from words; see `RowType.unpack`."""
        return words.view(torch.bfloat16)[:, :dimension].float()

    def pack(self, values: Tensor) -> Tensor:
        """Round the values and pack them in words; see `RowType.pack`."""
        rows, dimension = values.shape
        packed = torch.zeros(rows, 2 * self.num_words(dimension), dtype=torch.bfloat16)
        packed[:, :dimension] = values
        return packed.view(torch.float32)

    def round_update(self, values: Tensor, ids: NDArray[np.int64], step: int, key: tuple[int, int]) -> Tensor:
        """Return the values, rounded stochastically if so configured; see `RowType.round_update`."""
        if not self.stochastic:
            return values
        words = random_words(ids, self.num_words(values.shape[1]), key, ROUNDING, step)
        # bfloat16 drops the lower 16 bits of a float32. Adding 16 random bits to them carries into the upper
        # half with exactly the probability that stochastic rounding requires.
        drawn = words.astype(np.uint32).view(np.uint16)[:, : values.shape[1]]
        bits = values.contiguous().numpy().view(np.uint32)
        rounded = torch.from_numpy(((bits + drawn) & np.uint32(0xFFFF0000)).view(np.float32))
        # The carry would turn some NaNs into numbers.
        return torch.where(values.isfinite(), rounded, values)


@dataclass(frozen=True)
class TableConfig:
    """The configuration of a table.

    Attributes
    ----------
    name : str
    dimension : int
        Elements of a row.
    rule : RowRule
        The rule that updates rows.
    num_embeddings : int, optional
        Ids are 0 to `num_embeddings`, exclusive; without it any 64-bit id is valid.
    first_values : FirstValues
    seed : int
    options : mapping
        Options of the rule that differ from its `defaults`. A function is a schedule: it takes the number of
        updates of the table, including the current one, and returns the option.
    row_type : RowType
        How values are stored.
    admission : Admission, optional
        Which ids get a row; without it, each id gets one at its first update.
    eviction : tuple of Eviction
        Which rows are evicted.
    storage : Storage
        Where rows are kept.

    Raises
    ------
    ConfigurationError
        The dimension or the number of embeddings is not positive, the rule has no such option, an initial
        value of state has a schedule, two eviction rules have a mark of the same name, or the rule steps
        every row and the table's rows are not known.
    """

    name: str
    dimension: int
    rule: RowRule
    num_embeddings: int | None = None
    first_values: FirstValues = field(default_factory=Normal)
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    row_type: RowType = field(default_factory=Float32)
    admission: Admission | None = None
    eviction: tuple[Eviction, ...] = ()
    storage: Storage = IN_MEMORY

    def __post_init__(self) -> None:
        for what, value in (("dimension", self.dimension), ("num_embeddings", self.num_embeddings)):
            if value is not None and value < 1:
                raise ConfigurationError(f"table {self.name}: {what} is {value}, expected at least 1")
        if unknown := sorted(set(self.options).difference(self.rule.defaults())):
            raise ConfigurationError(
                f"table {self.name}: {type(self.rule).__name__} has no option {', '.join(unknown)}; "
                f"expected some of {', '.join(self.rule.defaults())}"
            )
        initial = {slot.initial_option for slot in self.rule.slots}
        scheduled = [name for name, option in self.options.items() if name in initial and callable(option)]
        if scheduled:
            raise ConfigurationError(
                f"table {self.name}: {scheduled[0]} is an initial value of state; expected a number, not a "
                "schedule"
            )
        marks = Counter(mark for policy in self.eviction for mark in policy.marks)
        if repeated := [mark for mark, times in marks.items() if times > 1]:
            raise ConfigurationError(
                f"table {self.name}: two eviction rules have the mark {repeated[0]}, expected one"
            )
        if self.steps_every_row and (self.num_embeddings is None or self.admission or self.eviction):
            raise ConfigurationError(
                f"table {self.name}: {type(self.rule).__name__} steps every row in each update with these "
                "options, and needs to know the rows; expected num_embeddings, and neither admission nor "
                "eviction, or an optimizer that steps only rows with a gradient: SGD, Adagrad, or Adam with "
                "lazy_mode=True, without a regularizer"
            )

    @property
    def steps_every_row(self) -> bool:
        """True if the rule and the options known in advance imply that each update changes every row."""
        return steps_every_row(self.rule, {**self.rule.defaults(), **self.options})

    def options_at(self, step: int) -> dict[str, Any]:
        """Return the rule's options for an update, with the values of schedules at that step.

        Parameters
        ----------
        step : int
            Number of updates of the table, including this one.

        Raises
        ------
        ConfigurationError
            A schedule does not return a finite number.
        """
        options = {**self.rule.defaults(), **self.options}
        for name, schedule in options.items():
            if callable(schedule):
                options[name] = found = schedule(step)
                if not isinstance(found, int | float) or not math.isfinite(found):
                    raise ConfigurationError(
                        f"table {self.name}: the schedule of {name} returns {found!r} for update {step}; "
                        "expected a number"
                    )
        return options

    def check_ids(self, ids: NDArray[np.int64]) -> None:
        """Raise an error if an id is out of range.

        Parameters
        ----------
        ids : int64[n]
            Ids to look up or update.

        Raises
        ------
        ConfigurationError
            An id is out of range; the message names it and its position.
        """
        limit = self.num_embeddings
        if limit is None or ids.size == 0:
            return
        # As unsigned numbers negative ids are above every limit, so one comparison finds both.
        if int(ids.view(np.uint64).max()) >= limit:
            at = int(np.flatnonzero(ids.view(np.uint64) >= np.uint64(limit))[0])
            raise ConfigurationError(
                f"table {self.name}: id {ids[at]} at position {at}, expected 0 to {limit - 1}"
            )
