"""Embeddings and bags of embeddings from the distinct rows of a batch, by position.

On a CPU, torch's own backward pass adds one row at a time with its general addition, which takes several
times as long as all other work on the rows of a batch. Here one C loop sums the gradient of each row.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, embedding_bag

from fleet.errors import ConfigurationError
from fleet.tables.kernels import add_rows

__all__ = ["MODES", "offsets_of", "pool", "take"]

MODES = ("sum", "mean", "max")

_operators = torch.library.Library("fleet", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define("sum_rows(Tensor positions, Tensor rows, SymInt num_rows) -> Tensor")  # type: ignore[no-untyped-call]


def take(rows: Tensor, positions: Tensor) -> Tensor:
    """Return the row at each position; the gradient of `rows` is one sum per row.

    Parameters
    ----------
    rows : float[n, dimension]
    positions : int64 or int32, any shape

    Returns
    -------
    float[*positions.shape, dimension]
    """
    if not _sums_here(rows):
        return embedding(positions, rows)
    taken: Tensor = _Take.apply(rows, positions)
    return taken


def pool(
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor | None,
    mode: str,
    *,
    weights: Tensor | None = None,
    padding: int | None = None,
    include_last_offset: bool = False,
) -> Tensor:
    """Return one vector for each bag; the gradient of `rows` is one sum per row.

    Parameters
    ----------
    rows : float[n, dimension]
    positions : int64[num_ids] or int64[bags, ids_per_bag]
        The row of each id.
    offsets : int64[bags], optional
        The start of each bag in one-dimensional `positions`; with `include_last_offset` also the end of the
        last.
    mode : str
        ``sum``, ``mean`` or ``max``.
    weights : float, same shape as `positions`, optional
        Factors of the rows; with ``sum`` only.
    padding : int, optional
        A row that is left out of bags and means.
    include_last_offset : bool

    Returns
    -------
    float[bags, dimension]
        0 for an empty bag.
    """
    if not rows.shape[0]:
        # A batch of empty bags: torch refuses a table without rows.
        rows = rows.new_zeros(1, rows.shape[1])
    if mode == "sum" and weights is None and _sums_here(rows):
        pooled: Tensor = _Sum.apply(rows, positions, offsets, include_last_offset, padding)
        return pooled
    return embedding_bag(
        positions,
        rows,
        offsets,
        mode=mode,
        per_sample_weights=weights,
        include_last_offset=include_last_offset,
        padding_idx=padding,
    )


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the start of each bag, and the end of the last one; int64[bags + 1].

    Raises
    ------
    ConfigurationError
        A length is negative.
    """
    if lengths.numel() and int(lengths.min()) < 0:
        raise ConfigurationError(f"a bag has the length {int(lengths.min())}, expected 0 or more")
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _sums_here(rows: Tensor) -> bool:
    """Return whether to sum gradients with the C loop instead of torch."""
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
        return _sum_at(positions.reshape(-1), gradient.reshape(-1, gradient.shape[-1]), ctx.num_rows), None


class _Sum(torch.autograd.Function):
    """Sums of bags. torch's own backward pass would sort the ids of the batch again."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        positions: Tensor,
        offsets: Tensor | None,
        include_last_offset: bool,
        padding: int | None,
    ) -> Tensor:
        pooled = embedding_bag(
            positions,
            rows,
            offsets,
            mode="sum",
            include_last_offset=include_last_offset,
            padding_idx=padding,
        )
        ctx.save_for_backward(positions.reshape(-1), _bags_of(positions, offsets, len(pooled)))
        ctx.padding, ctx.num_rows = padding, len(rows)
        return pooled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (positions, bags), (gradient,) = ctx.saved_tensors, gradients
        # With include_last_offset, positions after the last offset are in no bag.
        positions = positions[: len(bags)]
        if ctx.padding is not None:
            kept = positions != ctx.padding
            positions, bags = positions[kept], bags[kept]
        by_position = gradient.contiguous().index_select(0, bags)
        return _sum_at(positions, by_position, ctx.num_rows), *[None] * 4


def _bags_of(positions: Tensor, offsets: Tensor | None, num_bags: int) -> Tensor:
    """Return the bag of each id; int64[num_ids]."""
    bags = torch.arange(num_bags, device=positions.device)
    if offsets is None:
        return bags.repeat_interleave(positions.shape[1])
    ends = positions.new_full((num_bags + 1,), positions.numel(), dtype=torch.int64)
    ends[: len(offsets)] = offsets
    return bags.repeat_interleave(ends.diff())


def _sum_at(positions: Tensor, gradient: Tensor, num_rows: int) -> Tensor:
    """Return the sum of the gradients of each row; float[num_rows, dimension]."""
    if torch.is_grad_enabled() and gradient.requires_grad:
        # A second derivative is required: only torch's own operation has one.
        return gradient.new_zeros(num_rows, gradient.shape[1]).index_add(0, positions, gradient)
    sums: Tensor = torch.ops.fleet.sum_rows(positions, gradient, num_rows)
    return sums


# A torch operator, so that torch resolves lazily negated views, can trace it, and knows its shape.
@torch.library.impl(_operators, "sum_rows", "CPU")
def _sum_rows(positions: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return add_rows(rows.new_zeros(num_rows, rows.shape[1]), positions.long(), rows.contiguous())


@torch.library.impl(_operators, "sum_rows", "Meta")
def _shape_of_sums(positions: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    del positions
    return rows.new_empty(num_rows, rows.shape[1])
