"""What an update does to the rows of a table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

__all__ = ["RowRule", "Rows", "Slot"]


@dataclass(frozen=True)
class Slot:
    """A part of a row's state.

    Attributes
    ----------
    name : str
    per_element : bool
        Whether it is as wide as the row; else it is one number.
    initial_option : str, optional
        The option that gives its value in a row that was never updated; else that is 0.
    """

    name: str
    per_element: bool = True
    initial_option: str | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that are stepped: copies, which are written back.

    Attributes
    ----------
    value : float32[n, dimension]
    gradient : float32[n, dimension]
        The rule may overwrite it.
    state : mapping of name to float32[n, dimension] or float32[n, 1]
        By slot.
    """

    value: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]


class RowRule(Protocol):
    """Steps the rows of one update. What happens to a row depends on that row and the options alone."""

    slots: ClassVar[tuple[Slot, ...]]

    def defaults(self) -> Mapping[str, float]:
        """Return the options and their values where a table gives none."""

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Step rows in place.

        Parameters
        ----------
        rows : Rows
        options : mapping
            Those of this step; every name of `defaults` is there.
        step : int
            How many updates the table has had, this one included.
        """
