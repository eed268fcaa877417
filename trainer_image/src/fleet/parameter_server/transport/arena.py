"""Flat memory: one tensor per dtype, and views of bytes that sockets read from and write to.

Arenas are allocated once. What a training step moves goes from one arena, or from the gradient that autograd
made, straight to another, without a copy in between.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from fleet.errors import LocalProtocolError

__all__ = ["Arena", "Extent", "bytes_of", "copy_bytes", "dtype_of"]

_ALIGNMENT_BYTES: Final = 64

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Extent:
    """One tensor that an arena holds."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Arena(Generic[Key]):
    """Zeroed memory for tensors, one flat tensor per dtype.

    Parameters
    ----------
    extents : mapping of key to Extent
        Laid out in this order; each begins at a multiple of 64 bytes.
    pinned : bool
        Whether the memory is page-locked, for copies from and to a GPU.
    """

    def __init__(self, extents: Mapping[Key, Extent], *, pinned: bool = False) -> None:
        begins: dict[Key, int] = {}
        lengths: dict[torch.dtype, int] = {}
        for key, extent in extents.items():
            begins[key] = lengths.get(extent.dtype, 0)
            lengths[extent.dtype] = begins[key] + _aligned(prod(extent.shape), extent.dtype)
        self.flat = {
            dtype: torch.zeros(length, dtype=dtype, pin_memory=pinned) for dtype, length in lengths.items()
        }
        self._views = {
            key: self.flat[extent.dtype][begins[key] : begins[key] + prod(extent.shape)].view(extent.shape)
            for key, extent in extents.items()
        }

    def __getitem__(self, key: Key) -> Tensor:
        """Return the view of one tensor; always the same object."""
        return self._views[key]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor. They are the tensor's own, not a copy."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data)


def copy_bytes(source: memoryview, destination: memoryview) -> None:
    """Copy bytes, while other threads go on.

    Raises
    ------
    LocalProtocolError
        There are not as many as fit.
    """
    if len(source) != len(destination):
        raise LocalProtocolError(f"{len(source)} bytes are to be copied to a buffer of {len(destination)}")
    np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of this name, ``float32`` for instance."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} names no torch dtype")
    return dtype


def _aligned(numel: int, dtype: torch.dtype) -> int:
    per_line = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
    return -(-numel // per_line) * per_line
