"""What an `Executor` hands back: arrays, and numbers that the scripts of PyTorch and of Paddle both can read.

PyTorch's losses have no axes, and Paddle's are arrays of one element: the one's scripts say ``float(loss)``,
the other's ``loss[0]``. NumPy refuses the first of an array with an axis, and the second of one without.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FetchedNumber", "fetched"]


class FetchedNumber(np.ndarray[Any, Any]):
    """An array without axes that also answers ``[0]``, with its number; in all else a plain one.

    What is computed from it is NumPy's own, and so is what a pickle or a file of it gives back.
    """

    def __getitem__(self, key: Any) -> Any:
        """Return the number for ``[0]`` and ``[-1]``; anything else is as for any array."""
        whole = isinstance(key, (int, np.integer)) and not isinstance(key, bool)
        return super().__getitem__(() if self.ndim == 0 and whole and key in (0, -1) else key)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Return what a computation gives as it would be without this class."""
        if array is self:  # computed in place
            return self
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain array: who reads it may have no fleet."""
        return self.view(np.ndarray).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> "FetchedNumber":
        """Return a copy of this kind, which NumPy would make a plain one."""
        return self.copy()

    def __repr__(self) -> str:
        return repr(self.view(np.ndarray))


def fetched(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array as it is, and one without axes as a number that answers ``[0]`` too."""
    return values if values.ndim else values.view(FetchedNumber)
