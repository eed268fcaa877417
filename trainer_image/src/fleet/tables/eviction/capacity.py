"""What rules that bound the number of rows have in common."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.tables.eviction.interface import Touched
from fleet.tables.shards import SHARDS

__all__ = ["check_capacity", "over_capacity", "share", "the_last"]

_SLACK: Final = 16
"""Of a shard that is full one row in so many goes at once, so that few updates evict at all."""


def check_capacity(rule: str, capacity: int) -> None:
    """Raise ConfigurationError where a capacity leaves a shard without any row."""
    if capacity < SHARDS:
        raise ConfigurationError(
            f"{rule}: capacity is {capacity}, expected at least {SHARDS}: each of {SHARDS} virtual shards "
            "holds an equal part of it"
        )


def share(capacity: int, shard: Any) -> Any:
    """Return how many of a table's rows a shard may hold, or each of several; all of them make the whole."""
    return capacity // SHARDS + (shard < capacity % SHARDS)


def over_capacity(capacity: int, touched: Touched) -> NDArray[np.bool_]:
    """Return which shards hold more than their share."""
    over: NDArray[np.bool_] = touched.num_rows > share(capacity, touched.shards)
    return over


def the_last(capacity: int, shard: int, order: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which rows go, of which `order` names those to be kept first; bool[n]."""
    part = int(share(capacity, shard))
    leaving = np.zeros(order.size, dtype=np.bool_)
    if order.size > part:
        leaving[order[part - part // _SLACK :]] = True
    return leaving
