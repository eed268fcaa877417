"""As what numbers the values of rows are stored. Optimizer state is float32 always."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["RowType"]


class RowType(Protocol):
    """How values are stored in words of 32 bits."""

    def num_words(self, dimension: int) -> int:
        """Return how many words a row takes.

        Parameters
        ----------
        dimension : int
            How many values a row has.

        Returns
        -------
        int
            Of 32 bits each.
        """

    def unpack(self, words: Tensor, dimension: int) -> Tensor:
        """Return values; float32[n, dimension].

        Parameters
        ----------
        words : float32[n, num_words]
            Of any bits; each row is contiguous. Is returned where words and values are the same.
        dimension : int
        """

    def pack(self, values: Tensor) -> Tensor:
        """Return the words of values, each rounded to the nearest.

        Parameters
        ----------
        values : float32[n, dimension]
            The rows.

        Returns
        -------
        float32[n, num_words]
            Of any bits.
        """

    def round_update(self, values: Tensor, ids: NDArray[np.int64], step: int, key: tuple[int, int]) -> Tensor:
        """Return values after an update, rounded to what can be stored; float32[n, dimension].

        Parameters
        ----------
        values : float32[n, dimension]
        ids : int64[n]
        step : int
        key : two int
            Of the table's generator.
        """
