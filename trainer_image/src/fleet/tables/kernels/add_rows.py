"""Rows that are added up by place: the gradients of a row from every place of a batch, or every trainer."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from fleet.tables.kernels.library import library

__all__ = ["add_rows", "add_rows_by_torch"]

AddRows = Callable[[Tensor, Tensor, Tensor], Tensor]


def add_rows(totals: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Add each row to the total at its place, one after the other, and return the totals.

    Parameters
    ----------
    totals : float[m, dimension]
        Changed.
    places : int64[n]
        From 0 to m - 1, which nobody checks.
    rows : float[n, dimension]
    """
    compiled, places = _compiled(), places.contiguous()
    if (
        compiled is not None
        and _is_plain(places, torch.int64)
        and all(_is_plain(each, torch.float32) for each in (totals, rows))
        and (places.shape[0], totals.shape[1]) == rows.shape
    ):
        return compiled(totals, places, rows)
    return add_rows_by_torch(totals, places, rows)


def add_rows_by_torch(totals: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Do what `add_rows` does, which may be compiled."""
    return totals.index_add_(0, places, rows)


@cache
def _compiled() -> AddRows | None:
    if (kernels := library()) is None:
        return None
    function = kernels.fleet_add_rows
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2

    def add(totals: Tensor, places: Tensor, rows: Tensor) -> Tensor:
        num_rows, dimension = rows.shape
        function(totals.data_ptr(), places.data_ptr(), rows.data_ptr(), num_rows, dimension)
        return totals

    return add


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory of a tensor is an array of the host without gaps."""
    return (
        tensor.is_cpu and tensor.dtype is dtype and tensor.layout is torch.strided and tensor.is_contiguous()
    )
