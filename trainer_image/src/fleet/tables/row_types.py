"""Row types: how the values of rows are stored. A user-defined type has the members of `RowType`.

Optimizer state is always float32.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.tables.philox import ROUNDING, random_words

__all__ = ["BFloat16", "Float32", "RowType"]


class RowType(Protocol):
    """How values are stored in 32-bit words."""

    def num_words(self, dimension: int) -> int:
        """Return the number of words of a row.

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
        """Return the values that words hold; float32[n, dimension].

        Parameters
        ----------
        words : float32[n, num_words]
            Any bits; each row is contiguous. If words and values are the same, `words` itself is returned.
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
            Any bits.
        """

    def round_update(self, values: Tensor, ids: NDArray[np.int64], step: int, key: tuple[int, int]) -> Tensor:
        """Return updated values, rounded to what can be stored; float32[n, dimension].

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
    """Values in single precision, as they are computed."""

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


@dataclass(frozen=True)
class BFloat16:
    """Values rounded to bfloat16: half the memory, 8 bits of precision. Rules compute in float32.

    Attributes
    ----------
    stochastic : bool
        True: an update rounds up with the probability that makes the mean exact, so that steps below the
        precision add up over time. The draw is a function of the table, the id, the column and the step.
        False, and always for first values and loaded ones: to the nearest, ties to even.
    """

    stochastic: bool = False

    def num_words(self, dimension: int) -> int:
        """See `RowType`."""
        return (dimension + 1) // 2

    def unpack(self, words: Tensor, dimension: int) -> Tensor:
        """See `RowType`."""
        return words.view(torch.bfloat16)[:, :dimension].float()

    def pack(self, values: Tensor) -> Tensor:
        """See `RowType`."""
        rows, dimension = values.shape
        packed = torch.zeros(rows, 2 * self.num_words(dimension), dtype=torch.bfloat16)
        packed[:, :dimension] = values
        return packed.view(torch.float32)

    def round_update(self, values: Tensor, ids: NDArray[np.int64], step: int, key: tuple[int, int]) -> Tensor:
        """See `RowType`."""
        if not self.stochastic:
            return values
        words = random_words(ids, self.num_words(values.shape[1]), key, ROUNDING, step)
        # bfloat16 drops the lower 16 bits of a float32. Adding 16 random bits to them carries into the upper
        # half with exactly the probability that stochastic rounding asks for.
        drawn = words.astype(np.uint32).view(np.uint16)[:, : values.shape[1]]
        bits = values.contiguous().numpy().view(np.uint32)
        rounded = torch.from_numpy(((bits + drawn) & np.uint32(0xFFFF0000)).view(np.float32))
        return torch.where(values.isfinite(), rounded, values)
