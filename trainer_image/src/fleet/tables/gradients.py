"""Gradients of rows, and their sums over the positions of a batch or over trainers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.tables.ids import distinct_ids
from fleet.tables.kernels import is_plain, library

__all__ = ["RowGradients", "add_rows", "add_rows_by_torch", "merge"]


@dataclass(frozen=True, slots=True)
class RowGradients:
    """The gradients of some rows of a table.

    Attributes
    ----------
    ids : int64[n]
    values : float[n, dimension]
    """

    ids: NDArray[np.int64]
    values: Tensor

    @classmethod
    def of(cls, ids: NDArray[np.int64], values: NDArray[np.float32]) -> "RowGradients":
        """Build row gradients that share memory with a NumPy array.

        Parameters
        ----------
        ids : int64[n]
            The ids of the rows.
        values : float32[n, dimension]
            Their gradients.

        Returns
        -------
        RowGradients
            Changes if the array changes.
        """
        return cls(ids, torch.from_numpy(values))


def merge(parts: Sequence[RowGradients]) -> RowGradients:
    """Sum the gradients of each row, in the order in which `parts` contains them.

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


def add_rows(totals: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Add each of the rows, in order, to the total that its entry in `places` selects; return the totals.

    Parameters
    ----------
    totals : float[m, dimension]
        Changed in place.
    places : int64[n]
        0 to m - 1; not checked.
    rows : float[n, dimension]
    """
    compiled, places = library(), places.contiguous()
    if (
        compiled is not None
        and is_plain(places, torch.int64)
        and is_plain(totals, torch.float32)
        and is_plain(rows, torch.float32)
        and (places.shape[0], totals.shape[1]) == rows.shape
    ):
        compiled.fleet_add_rows(totals.data_ptr(), places.data_ptr(), rows.data_ptr(), *rows.shape)
        return totals
    return add_rows_by_torch(totals, places, rows)


def add_rows_by_torch(totals: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Compute the result of `add_rows` without compiled code."""
    return totals.index_add_(0, places, rows)
