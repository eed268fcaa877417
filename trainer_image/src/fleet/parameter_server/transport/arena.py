"""Flat memory for tensors: one tensor for each dtype, with byte views for sockets.

Arenas are allocated once. A training step moves bytes from one arena, or from a gradient of autograd, to
another arena without an intermediate copy.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from fleet.errors import LocalProtocolError

__all__ = ["Arena", "Extent", "LazyBytes", "bytes_of", "copy_bytes", "dtype_of"]

_ALIGNMENT_BYTES: Final = 64

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Extent:
    """The dtype and shape of a tensor in an arena."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Arena(Generic[Key]):
    """Zero-initialized memory for many tensors, allocated as one flat tensor for each dtype.

    Parameters
    ----------
    extents : mapping of key to Extent
        The tensors, which are laid out in this order; each begins at a multiple of 64 bytes.
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
        """Return the tensor of a key; repeated calls return the same object."""
        return self._views[key]


@dataclass(frozen=True, slots=True)
class LazyBytes:
    """Payload bytes that are read only when they are sent or resent.

    Without lazy reading, a value that may change at any time would have to be copied for each receiving
    trainer, and each copy would have to be kept until it is acknowledged.

    Attributes
    ----------
    num_bytes : int
        The number of bytes, which is fixed.
    read : callable
        Fills a buffer with a consistent copy of the bytes from an offset on. The offsets are multiples of 64
        bytes. Several threads may call it concurrently.
    """

    num_bytes: int
    read: Callable[[int, memoryview], None]

    def __len__(self) -> int:
        """Return the number of bytes."""
        return self.num_bytes


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of a contiguous CPU tensor's bytes."""
    if tensor.dtype is torch.float32 and tensor.numel():  # in a sixth of the time, several times in a step
        return memoryview(tensor.detach().numpy().data).cast("B")
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data)


def copy_bytes(source: memoryview, destination: memoryview) -> None:
    """Copy bytes without holding the GIL.

    Raises
    ------
    LocalProtocolError
        The sizes differ.
    """
    if len(source) != len(destination):
        raise LocalProtocolError(f"{len(source)} bytes are to be copied to a buffer of {len(destination)}")
    np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype with the given name, such as ``float32``."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} names no torch dtype")
    return dtype


def _aligned(numel: int, dtype: torch.dtype) -> int:
    per_line = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
    return -(-numel // per_line) * per_line
