"""C loops over ids and rows; they are used if compilation succeeded during installation.

Each has a NumPy or torch equivalent with bitwise-identical results, which is used if the library is missing.
Arguments are addresses: a check of an array in each call would take longer than most loops. So callers pass
contiguous arrays of the types that the C files name, and hold them during the call.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["FEW", "RowAddresses", "is_plain", "library"]

FEW: Final = 1024
"""A loop over at most this many ids keeps the GIL: reacquiring the GIL could take longer than the loop."""
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_STEP: Final = (
    *(_COUNT, _POINTER, _POINTER, _COUNT, _POINTER, _POINTER, _POINTER, _COUNT),
    *(ctypes.c_double, ctypes.c_double, ctypes.c_int32),
)
_PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "fleet_add_rows": (None, _POINTER, _POINTER, _POINTER, _COUNT, _COUNT),
    "fleet_distinct_ids": (_COUNT, _POINTER, _COUNT, *[_POINTER] * 4),
    "fleet_find_rows": (_COUNT, _POINTER, _POINTER, _COUNT, _POINTER),
    "fleet_read_rows": (_COUNT, _POINTER, _POINTER, _COUNT, _POINTER, _POINTER, _COUNT),
    "fleet_step_rows": _STEP,
    "fleet_step_rows_fused": _STEP,
}
"""The result type and the argument types of each function."""


class RowAddresses(ctypes.Structure):
    """The addresses of a table's rows and index, for the compiled loops.

    Attributes
    ----------
    entries : int
        Address of the entries of a `RowIndex`; uint32[4 * size], and size is a power of two, at least 2.
    ids : int
        Address of the id of each row.
    direct : int
        Address of the row of each id in a `DirectIndex`, int32[size]; 0 for a `RowIndex`.
    words : int
        Address of the rows, float32[rows, width].
    size : int
    width : int
    number_bits : int
        Bits of a row number in an entry.
    """

    _fields_ = (
        ("entries", _POINTER),
        ("ids", _POINTER),
        ("direct", _POINTER),
        ("words", _POINTER),
        ("size", ctypes.c_uint64),
        ("width", ctypes.c_int64),
        ("number_bits", ctypes.c_uint32),
    )


def library(*, keeps_lock: bool = False) -> Any:
    """Return the compiled library, or None if it is not available on this machine.

    Parameters
    ----------
    keeps_lock : bool
        Whether its functions keep the interpreter's lock, for loops over at most `FEW` ids.
    """
    return _opened(ctypes.PyDLL if keeps_lock else ctypes.CDLL)


@cache
def _opened(kind: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL | None:
    try:
        opened = kind(str(Path(__file__).with_name("kernels.so")))
        for name, (result, *arguments) in _PROTOTYPES.items():
            function = getattr(opened, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):  # there is none, or an older version of this package compiled it
        return None
    return opened


def is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor is a contiguous array of the given dtype in host memory."""
    return (
        tensor.is_cpu and tensor.dtype is dtype and tensor.layout is torch.strided and tensor.is_contiguous()
    )
