"""Row gradients of several trainers, or of several places in a batch, as one gradient a row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
        """Return gradients whose values lie in an array, which they share."""
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
    values = torch.cat([part.values for part in parts]) if len(parts) > 1 else parts[0].values
    ids, places = np.unique(np.concatenate([part.ids for part in parts]), return_inverse=True)
    total = values.new_zeros(ids.size, values.shape[1])
    return RowGradients(ids, total.index_add_(0, torch.from_numpy(places.astype(np.int64)), values))
