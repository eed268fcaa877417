"""The gradients of rows that backward passes have brought since the last step."""

from torch import Tensor

from fleet.nn.table import Touched
from fleet.process.finite import OfRows
from fleet.tables import RowGradients, merge

__all__ = ["Gathered"]


class Gathered:
    """What has a gradient, by table and look-up."""

    def __init__(self) -> None:
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
        """
        parts: dict[str, list[RowGradients]] = {}
        for (name, _), touched in sorted(self._touched.items()):
            if (gradient := touched.gradient()) is not None:
                parts.setdefault(name, []).append(RowGradients(touched.ids, gradient))
        return {
            name: (total.ids, total.values)
            for name, of_table in parts.items()
            for total in ([of_table[0]] if len(of_table) == 1 else [merge(of_table)])
        }

    def leaves(self) -> list[Tensor]:
        """Return the gradients as backward passes have left them, for what changes them in place."""
        grads = (touched.rows.grad for touched in self._touched.values())
        return [grad for grad in grads if grad is not None]
