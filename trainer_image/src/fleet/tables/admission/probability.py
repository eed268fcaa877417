"""An id gets a row with each update with a probability."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.tables.philox import ADMISSION, random_words

__all__ = ["Probability"]


@dataclass(frozen=True)
class Probability:
    """Each update of an id gives it a row with `probability`; nothing is remembered.

    The draw is a function of the table's generator, the id and the step.

    Attributes
    ----------
    probability : float
        Above 0, up to 1.
    """

    probability: float

    def __post_init__(self) -> None:
        if not 0.0 < self.probability <= 1.0:
            raise ConfigurationError(
                f"Probability: probability is {self.probability}, expected a number above 0, up to 1"
            )

    def candidates(self, key: tuple[int, int]) -> "_Drawn":
        """See `Admission`."""
        return _Drawn(self.probability, key)


class _Drawn:
    def __init__(self, probability: float, key: tuple[int, int]) -> None:
        self._below = np.uint64(round(probability * 2**32))
        self._key = key

    @property
    def nbytes(self) -> int:
        return 0

    def admit(self, ids: NDArray[np.int64], step: int) -> NDArray[np.bool_]:
        drawn: NDArray[np.bool_] = random_words(ids, 1, self._key, ADMISSION, step)[:, 0] < self._below
        return drawn

    def saved(self) -> Mapping[str, NDArray[Any]]:
        return {}

    def load(self, saved: Mapping[str, NDArray[Any]]) -> None:
        del saved
