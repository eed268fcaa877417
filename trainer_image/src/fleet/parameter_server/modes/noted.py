"""Ids that are noted until their trainer is told of the rows, some at a time and any number of times."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["note"]

_MOST_APART: Final = 64
"""So many arrays of ids are kept apart before those that come twice are dropped."""


def note(noted: list[NDArray[np.int64]], ids: NDArray[np.int64]) -> None:
    """Append ids; from time to time those that come twice are dropped, so the list stays bounded."""
    noted.append(ids)
    if len(noted) > _MOST_APART:
        noted[:] = [np.unique(np.concatenate(noted))]
