"""Embeddings from the distinct rows of a batch, by position, as ``torch.nn.functional.embedding`` gives them.

On a processor torch's own backward pass adds one row after the other by a call of its general addition, which
takes several times as long as all else that is done to the rows of a batch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fleet.tables.kernels import add_rows

__all__ = ["sum_at", "take"]


def take(rows: Tensor, positions: Tensor) -> Tensor:
    """Return the row at each position; what comes back to `rows` is one gradient a row.

    Parameters
    ----------
    rows : float[n, dimension]
    positions : int64, of any shape

    Returns
    -------
    float, of the positions' shape and one more dimension
    """
    if not rows.is_cpu or torch.compiler.is_compiling():
        return embedding(positions, rows)
    taken: Tensor = _Take.apply(rows, positions)
    return taken


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
    positions : int64[n]
    gradient : float[n, dimension]
    num_rows : int

    Returns
    -------
    float[num_rows, dimension]
    """
    sums = gradient.new_zeros(num_rows, gradient.shape[1])
    if torch.is_grad_enabled() and gradient.requires_grad:
        return sums.index_add(0, positions, gradient)
    return add_rows(sums, positions, gradient.contiguous())
