"""Rows in bfloat16: half the memory, 8 bits of precision."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.tables.philox import ROUNDING, random_words

__all__ = ["BFloat16"]


@dataclass(frozen=True)
class BFloat16:
    """Values rounded to bfloat16. Rules compute in float32.

    Attributes
    ----------
    stochastic : bool
        Whether updates round up with the probability that makes the mean exact, so that steps too small for
        the precision count in the long run. The draw is a function of the table's generator, the id, the
        column and the step. Otherwise, and for first values and loaded ones, to the nearest, ties to even.
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
        # The lower 16 bits of a float32 are what bfloat16 lacks: added to 16 random ones they may carry.
        drawn = words.astype(np.uint32).view(np.uint16)[:, : values.shape[1]]
        bits = values.contiguous().numpy().view(np.uint32)
        rounded = torch.from_numpy(((bits + drawn) & np.uint32(0xFFFF0000)).view(np.float32))
        return torch.where(values.isfinite(), rounded, values)
