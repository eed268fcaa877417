"""Ids that ascend, each once: what is among them is found without sorting them anew."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["find_among"]


def find_among(
    ids: NDArray[np.int64], ascending: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which ids are among others, which ascend, bool[n], and of those the places there."""
    if not ascending.size:
        return np.zeros(ids.size, dtype=np.bool_), ascending
    places = np.searchsorted(ascending, ids)
    found: NDArray[np.bool_] = ascending.take(places, mode="clip") == ids
    return found, places[found]
