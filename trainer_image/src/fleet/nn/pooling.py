"""Bags of embeddings as one vector each, from the distinct rows of a batch. Pure functions."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from fleet.errors import ConfigurationError
from fleet.nn.taking import sum_at, sums_here

__all__ = ["MODES", "offsets_of", "pool"]

MODES = ("sum", "mean", "max")


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
    """Return one vector for each bag; what comes back to `rows` is one gradient a row.

    Parameters
    ----------
    rows : float[n, dimension]
    positions : int64[num_ids] or int64[bags, ids_per_bag]
        Which of the rows each id has.
    offsets : int64[bags], optional
        Where each bag begins in `positions`, where these have one dimension; one more with
        `include_last_offset`, their end.
    mode : str
        ``sum``, ``mean`` or ``max``.
    weights : float, of the shape of `positions`, optional
        By which rows are multiplied before they are summed; with ``sum`` only.
    padding : int, optional
        The row that is no part of any bag, and is not counted by a mean.
    include_last_offset : bool

    Returns
    -------
    float[bags, dimension]
        0 for a bag without any.
    """
    if not rows.shape[0]:
        # A batch of empty bags: torch refuses a table without a row.
        rows = rows.new_zeros(1, rows.shape[1])
    if mode == "sum" and weights is None and sums_here(rows):
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


class _Sum(torch.autograd.Function):
    """Torch's sums of bags. Its own backward pass would sort the ids of the batch once more."""

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
        positions = positions[
            : len(bags)
        ]  # those behind the last offset, where it says the end, are in no bag
        if ctx.padding is not None:
            kept = positions != ctx.padding
            positions, bags = positions[kept], bags[kept]
        by_position = gradient.contiguous().index_select(0, bags)
        return sum_at(positions, by_position, ctx.num_rows), *[None] * 4


def _bags_of(positions: Tensor, offsets: Tensor | None, num_bags: int) -> Tensor:
    """Return which bag each id is in; int64[num_ids]."""
    bags = torch.arange(num_bags, device=positions.device)
    if offsets is None:
        return bags.repeat_interleave(positions.shape[1])
    ends = positions.new_full((num_bags + 1,), positions.numel(), dtype=torch.int64)
    ends[: len(offsets)] = offsets
    return bags.repeat_interleave(ends.diff())


def offsets_of(lengths: Tensor) -> Tensor:
    """Return where each bag begins, and the end of the last one; int64[bags + 1].

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
