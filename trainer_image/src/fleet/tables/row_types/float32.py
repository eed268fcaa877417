"""Rows in single precision."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Float32"]


@dataclass(frozen=True)
class Float32:
    """Values as they are computed."""

    def num_words(self, dimension: int) -> int:
        """See `RowType`."""
        return dimension

    def unpack(self, words: Tensor, dimension: int) -> Tensor:
        """See `RowType`."""
        del dimension
        return words

    def pack(self, values: Tensor) -> Tensor:
        """See `RowType`."""
        return values

    def round_update(self, values: Tensor, ids: NDArray[np.int64], step: int, key: tuple[int, int]) -> Tensor:
        """See `RowType`."""
        del ids, step, key
        return values
