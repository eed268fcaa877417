"""The configuration of a table: one value that all servers and trainers of a job agree on."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.tables.admission import Admission
from fleet.tables.eviction import Eviction
from fleet.tables.first_values import FirstValues, Normal
from fleet.tables.row_types import Float32, RowType
from fleet.tables.rules import RowRule
from fleet.tables.storage import IN_MEMORY, Storage

__all__ = ["TableConfig"]


@dataclass(frozen=True)
class TableConfig:
    """The configuration of a table.

    Attributes
    ----------
    name : str
    dimension : int
        Elements of a row.
    rule : RowRule
        How an update steps a row.
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
        Which ids get a row; without it, each id gets one with its first update.
    eviction : tuple of Eviction
        Which rows are evicted.
    storage : Storage
        Where rows are kept.

    Raises
    ------
    ConfigurationError
        The dimension or the number of embeddings is not positive, the rule has no such option, an initial
        value of state has a schedule, or two eviction rules have a mark of the same name.
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

    def options_at(self, step: int) -> dict[str, Any]:
        """Return the rule's options for an update.

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
        """Check that ids are in range.

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
