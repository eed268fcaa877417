"""Embeddings from the distinct rows of a batch, by position, as ``torch.nn.functional.embedding`` gives them.

On a processor torch's own backward pass adds one row after the other by a call of its general addition, which
takes several times as long as all else that is done to the rows of a batch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fleet.tables.kernels import add_rows

__all__ = ["take"]


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
    if torch.compiler.is_compiling():  # which makes a loop of its own of torch's
        return embedding(positions, rows)
    taken: Tensor = _Take.apply(rows, positions)
    return taken


class _Take(torch.autograd.Function):
    """A backward pass that is to be differentiated itself is torch's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.num_rows = len(rows)
        return embedding(positions, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (positions,), (gradient,) = ctx.saved_tensors, gradients
        if torch.is_grad_enabled() or not gradient.is_cpu:
            of_rows: Tensor = torch.ops.aten.embedding_dense_backward(
                gradient, positions, ctx.num_rows, -1, False
            )
            return of_rows, None
        flat = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        return add_rows(flat.new_zeros(ctx.num_rows, flat.shape[1]), positions.reshape(-1), flat), None
