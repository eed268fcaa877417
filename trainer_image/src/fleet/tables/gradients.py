"""Gradients of rows, and their sum over the positions of a batch or over trainers."""

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
        """Return gradients that share the memory of an array.

        Parameters
        ----------
        ids : int64[n]
            The ids of the rows.
        values : float32[n, dimension]
            Their gradients.

        Returns
        -------
        RowGradients
            Changes with the array.
        """
        return cls(ids, torch.from_numpy(values))


def merge(parts: Sequence[RowGradients]) -> RowGradients:
    """Sum the gradients of each row, in the order of the parts and within each part.

    The fixed order makes a row's sum bitwise reproducible, regardless of the other rows.

    Parameters
    ----------
    parts : sequence of RowGradients
        At least one; all of one dimension and dtype. Ids may repeat.

    Returns
    -------
    RowGradients
        Distinct ids, ascending.
    """
    ids, positions = distinct_ids(np.concatenate([part.ids for part in parts]))
    total = parts[0].values.new_zeros(ids.size, parts[0].values.shape[1])
    begin = 0
    for part in parts:
        end = begin + part.ids.size
        add_rows(total, torch.from_numpy(positions[begin:end]), part.values)
        begin = end
    return RowGradients(ids, total)
