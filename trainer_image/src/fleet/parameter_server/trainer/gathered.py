"""The gradients of rows that backward passes have brought since the last step."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from fleet.errors import ConfigurationError
from fleet.nn.table import Touched, to_host
from fleet.process.finite import OfRows
from fleet.tables import RowGradients, merge

__all__ = ["Gathered"]


class Gathered:
    """What has a gradient, by table and look-up.

    Parameters
    ----------
    own : mapping of name to Parameter
        The weights of tables that this trainer holds too; their gradients are sparse.
    """

    def __init__(self, own: Mapping[str, Parameter]) -> None:
        self._own = own
        self._touched: dict[tuple[str, int], Touched] = {}

    def add(self, name: str, touched: Touched) -> None:
        """Take note of rows of a table that have a gradient; a second backward pass adds to the same."""
        self._touched[name, touched.order] = touched

    def forget(self) -> None:
        """Drop all of it, as ``zero_grad()`` does."""
        touched, self._touched = self._touched, {}
        for each in touched.values():
            each.rows.grad = None

    def sums(self) -> OfRows:
        """Return by table the ids that have a gradient, ascending, and the sum for each of them.

        Look-ups are added in their order, whichever was the first that a backward pass came to.

        Raises
        ------
        ConfigurationError
            The gradient of a table that this trainer holds too is not sparse.
        """
        parts = {
            name: [_rows_of(name, weight)] for name, weight in self._own.items() if weight.grad is not None
        }
        for (name, _), touched in sorted(self._touched.items()):
            if (gradient := touched.gradient()) is not None:
                parts.setdefault(name, []).append(RowGradients(touched.ids, gradient))
        return {
            name: (total.ids, total.values)
            for name, of_table in parts.items()
            for total in ([of_table[0]] if len(of_table) == 1 else [merge(of_table)])
        }

    def seen(self, name: str, ids: NDArray[np.int64]) -> Tensor:
        """Return the values with which rows that have a gradient were looked up; the first look-up's.

        Parameters
        ----------
        name : str
            The table's.
        ids : int64[n]

        Returns
        -------
        float32[n, dimension]
        """
        touched = [each for (of, _), each in sorted(self._touched.items()) if of == name]
        known, places = np.unique(np.concatenate([each.ids for each in touched]), return_index=True)
        values = torch.cat([each.values() for each in touched])
        return values[torch.from_numpy(places[np.searchsorted(known, ids)])]

    def leaves(self) -> list[Tensor]:
        """Return the gradients as backward passes have left them, for what changes them in place."""
        leaves = (*(touched.rows for touched in self._touched.values()), *self._own.values())
        grads = (leaf.grad for leaf in leaves)
        return [grad for grad in grads if grad is not None]


def _rows_of(name: str, weight: Parameter) -> RowGradients:
    """Return the gradient of a weight as that of rows, each once; the gradient itself stays."""
    if weight.grad is None or not weight.grad.is_sparse:
        raise ConfigurationError(
            f"the gradient of {name} is not sparse, and its module has sparse=True, so parameter servers "
            "step rows of it; is the weight used elsewhere too? Use sparse=False there"
        )
    gradient = weight.grad.coalesce().detach()
    return RowGradients(gradient.indices()[0].cpu().numpy(), to_host(gradient.values()))
