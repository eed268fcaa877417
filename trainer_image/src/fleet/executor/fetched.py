"""What an `Executor` hands back: arrays, and numbers as the original's, with the shape ``(1,)``.

The original's users say ``loss[0]``, ``"%f" % loss`` and ``float(loss)``, those of PyTorch ``f"{loss:.4f}"``.
NumPy formats no array with an axis, and from 2.4 on makes no number of one either.
"""

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FetchedNumber", "fetched"]


class FetchedNumber(np.ndarray[Any, Any]):
    """An array of shape ``(1,)`` that is a number too, wherever Python wants one.

    What is computed from it is of this kind where it has this shape, as a running sum of losses is, and
    NumPy's own otherwise. So is what a pickle or a file of it gives back.
    """

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return operator.index(self.item())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.item(), digits)

    def __format__(self, spec: str) -> str:
        """Format the number by a specification, and the array without one."""
        return format(self.item(), spec) if spec else str(self)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Return what a computation gives: of this kind where it is one number along one axis."""
        if array is self:  # computed in place
            return self
        plain = np.asarray(array)
        if return_scalar:
            return plain[()]
        return plain.view(FetchedNumber) if plain.shape == (1,) else plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain array: who reads it may have no fleet."""
        return self.view(np.ndarray).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> "FetchedNumber":
        """Return a copy of this kind, which NumPy would make a plain one."""
        return self.copy()

    def __repr__(self) -> str:
        return repr(self.view(np.ndarray))


def fetched(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array as it is, and one without axes, or with one number along its axis, as a number."""
    return values.reshape(1).view(FetchedNumber) if values.shape in ((), (1,)) else values
