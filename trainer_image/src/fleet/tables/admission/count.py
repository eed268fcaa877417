"""An id gets a row with its n-th update."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.tables.id_numbers import IdNumbers

__all__ = ["CountFilter"]


@dataclass(frozen=True)
class CountFilter:
    """An id gets a row with its `count`-th update, counted exactly.

    The ids that are still counted take 14 to 22 bytes each, for as long as they are: a `BloomFilter` is
    bounded.

    Attributes
    ----------
    count : int
        With 1 every id has a row from its first update on.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigurationError(f"CountFilter: count is {self.count}, expected at least 1")

    def candidates(self, key: tuple[int, int]) -> "_Counted":
        """See `Admission`."""
        del key
        return _Counted(self.count)


class _Counted:
    def __init__(self, count: int) -> None:
        self._count = count
        self._seen = IdNumbers()

    @property
    def nbytes(self) -> int:
        return self._seen.nbytes

    def admit(self, ids: NDArray[np.int64], step: int) -> NDArray[np.bool_]:
        del step
        admitted = self._seen.add(ids, 1) >= self._count
        self._seen.remove(ids[admitted])
        return admitted

    def saved(self) -> Mapping[str, NDArray[Any]]:
        ids, counts = self._seen.items()
        return {"ids": ids, "counts": counts}

    def load(self, saved: Mapping[str, NDArray[Any]]) -> None:
        self._seen.put(saved["ids"], saved["counts"])
