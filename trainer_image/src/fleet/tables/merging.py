"""Row gradients of several trainers, or of several places in a batch, as one gradient a row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.tables.kernels import add_rows, distinct_ids

__all__ = ["RowGradients", "merge"]


@dataclass(frozen=True, slots=True)
class RowGradients:
    """Gradients of some rows of a table.

    Attributes
    ----------
    ids : int64[n]
    values : float[n, dimension]
    """

    ids: NDArray[np.int64]
    values: Tensor

    @classmethod
    def of(cls, ids: NDArray[np.int64], values: NDArray[np.float32]) -> "RowGradients":
        """Return gradients whose values lie in an array, which they share.

        Parameters
        ----------
        ids : int64[n]
            Of the rows.
        values : float32[n, dimension]
            Their gradients.

        Returns
        -------
        RowGradients
            Changes with the array.
        """
        return cls(ids, torch.from_numpy(values))


def merge(parts: Sequence[RowGradients]) -> RowGradients:
    """Sum the gradients of each row, in the order of the parts and of the places in them.

    The order is kept, so that a row's sum is the same to the bit whichever other rows are there.

    Parameters
    ----------
    parts : sequence of RowGradients
        At least one; all of one dimension and dtype. An id may come more than once.

    Returns
    -------
    RowGradients
        Each id once, ascending.
    """
    ids, places = distinct_ids(np.concatenate([part.ids for part in parts]))
    total = parts[0].values.new_zeros(ids.size, parts[0].values.shape[1])
    begin = 0
    for part in parts:
        end = begin + part.ids.size
        add_rows(total, torch.from_numpy(places[begin:end]), part.values)
        begin = end
    return RowGradients(ids, total)
