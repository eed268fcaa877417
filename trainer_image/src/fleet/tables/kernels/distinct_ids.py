"""Which ids are in a batch, each once."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.tables.kernels.library import array_of, library

__all__ = ["distinct_by_numpy", "distinct_ids"]

_MOST: Final = 2**31 - 1
"""In C the places of ids are uint32."""

Ids = NDArray[np.int64]
Distinct = Callable[[Ids], tuple[Ids, NDArray[np.int64]]]


def distinct_ids(ids: Ids) -> tuple[Ids, NDArray[np.int64]]:
    """Return ids in ascending order, each once, and where among them each of those given is.

    Parameters
    ----------
    ids : int64[n]

    Returns
    -------
    int64[m], int64[n]
    """
    ids, compiled = np.asarray(ids, dtype=np.int64).reshape(-1), _compiled()
    return compiled(ids) if compiled is not None and ids.size <= _MOST else distinct_by_numpy(ids)


def distinct_by_numpy(ids: Ids) -> tuple[Ids, NDArray[np.int64]]:
    """Return what `distinct_ids` does, which may be compiled."""
    distinct, positions = np.unique(ids, return_inverse=True)
    return distinct, positions.astype(np.int64, copy=False)


@cache
def _compiled() -> Distinct | None:
    if (kernels := library()) is None:
        return None
    function = kernels.fleet_distinct_ids
    function.restype = ctypes.c_int64
    function.argtypes = [array_of(np.int64), ctypes.c_int64, array_of(np.uint64), array_of(np.uint32)]
    function.argtypes += [array_of(np.int64)] * 2

    def distinct(ids: Ids) -> tuple[Ids, NDArray[np.int64]]:
        ids, keys = np.ascontiguousarray(ids), np.empty(2 * ids.size, dtype=np.uint64)
        found, positions = np.empty(ids.size, dtype=np.int64), np.empty(ids.size, dtype=np.int64)
        places = np.empty(2 * ids.size, dtype=np.uint32)
        number = function(ids, ids.size, keys, places, found, positions)
        return found[:number].copy(), positions

    return distinct
