"""The library that was compiled from the C files of this folder."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["array_of", "library"]


@cache
def library() -> ctypes.CDLL | None:
    """Return the library; None where none was compiled for this machine."""
    try:
        return ctypes.CDLL(str(Path(__file__).with_name("kernels.so")))
    except OSError:
        return None


def array_of(dtype: type[np.generic]) -> Any:
    """Return the type of an argument that is an array of one dimension, without gaps."""
    return np.ctypeslib.ndpointer(dtype, ndim=1, flags="C_CONTIGUOUS")
