"""Slicing: how a parameter is cut into blocks that different servers hold."""

from dataclasses import dataclass
from math import prod

__all__ = ["Slice", "slice_variable"]


@dataclass(frozen=True, slots=True)
class Slice:
    """One block of a variable: its elements ``begin`` to ``end``, whole rows where it has rows."""

    index: int
    begin: int
    end: int
    shape: tuple[int, ...]


def slice_variable(shape: tuple[int, ...], slice_count: int, min_block_size: int) -> tuple[Slice, ...]:
    """Cut a variable into at most `slice_count` blocks of about the same size.

    Parameters
    ----------
    shape : tuple of int
        The variable's shape.
    slice_count : int
        The most blocks wanted: the number of servers, or 1 to leave the variable whole.
    min_block_size : int
        Elements that a block should have at least; a smaller variable stays whole.

    Returns
    -------
    tuple of Slice
        In order; together they hold each element once.

    Notes
    -----
    The original's arithmetic: blocks of ``ceil(numel / count)`` elements, rounded up to whole rows for
    two and more dimensions, after which fewer blocks may be left.

    >>> [block.shape for block in slice_variable((10001, 10), 2, 8192)]
    [(5001, 10), (5000, 10)]
    >>> [block.shape for block in slice_variable((1000,), 2, 8192)]
    [(1000,)]
    """
    numel = prod(shape)
    if numel == 0:
        return (Slice(0, 0, 0, shape),)
    row = prod(shape[1:])
    count = min(slice_count, max(1, numel // min_block_size))
    block = -(-numel // count)
    block = -(-block // row) * row
    if block >= numel:
        return (Slice(0, 0, numel, shape),)
    begins = range(0, numel, block)
    ends = [min(begin + block, numel) for begin in begins]
    return tuple(
        Slice(index, begin, end, ((end - begin) // row, *shape[1:]))
        for index, (begin, end) in enumerate(zip(begins, ends, strict=True))
    )
