"""Embeddings from the distinct rows of a batch, by position, as ``torch.nn.functional.embedding`` gives them.

On a processor torch's own backward pass adds one row after the other by a call of its general addition, which
takes several times as long as all else that is done to the rows of a batch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fleet.tables.kernels import add_rows

__all__ = ["sum_at", "sums_here", "take"]

_operators = torch.library.Library("fleet", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define("sum_rows(Tensor positions, Tensor rows, SymInt num_rows) -> Tensor")  # type: ignore[no-untyped-call]


def take(rows: Tensor, positions: Tensor) -> Tensor:
    """Return the row at each position; what comes back to `rows` is one gradient a row.

    Parameters
    ----------
    rows : float[n, dimension]
    positions : int64 or int32, of any shape

    Returns
    -------
    float, of the positions' shape and one more dimension
    """
    if not sums_here(rows):
        return embedding(positions, rows)
    taken: Tensor = _Take.apply(rows, positions)
    return taken


def sums_here(rows: Tensor) -> bool:
    """Whether the gradient of rows is summed here, and not by torch."""
    return rows.requires_grad and rows.is_cpu and not torch.compiler.is_compiling()


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.num_rows = len(rows)
        return embedding(positions, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (positions,), (gradient,) = ctx.saved_tensors, gradients
        return sum_at(positions.reshape(-1), gradient.reshape(-1, gradient.shape[-1]), ctx.num_rows), None


def sum_at(positions: Tensor, gradient: Tensor, num_rows: int) -> Tensor:
    """Return one gradient a row; where that may be differentiated itself, by torch alone.

    Parameters
    ----------
    positions : int64 or int32[n]
    gradient : float[n, dimension]
    num_rows : int

    Returns
    -------
    float[num_rows, dimension]
    """
    if torch.is_grad_enabled() and gradient.requires_grad:
        return gradient.new_zeros(num_rows, gradient.shape[1]).index_add(0, positions, gradient)
    sums: Tensor = torch.ops.fleet.sum_rows(positions, gradient, num_rows)
    return sums


# An operator of torch's, so that torch resolves views that are negated, traces it, and knows its shape.
@torch.library.impl(_operators, "sum_rows", "CPU")
def _sum_rows(positions: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return add_rows(rows.new_zeros(num_rows, rows.shape[1]), positions.long(), rows.contiguous())


@torch.library.impl(_operators, "sum_rows", "Meta")
def _shape_of_sums(positions: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    del positions
    return rows.new_empty(num_rows, rows.shape[1])
