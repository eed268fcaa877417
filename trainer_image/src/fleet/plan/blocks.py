"""Blocks: contiguous ranges of a parameter's elements, the units that are sent and updated.

A parameter is sliced along its first dimension, so that several servers share the work. Each slice is one
block; a parameter that is not sliced is a single block.
"""

from dataclasses import dataclass
from math import prod

from fleet.plan.spec import ParameterSpec

__all__ = ["PlannedBlock", "Slice", "plan_block", "slice_variable"]


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """A block: its range of elements in a parameter, and the server that owns it."""

    id: int
    """The block's position among all blocks of the job; the same on every trainer and server."""
    name: str
    """The block's name, such as ``w.block1``; the parameter's name if the parameter is not sliced."""
    grad: str
    """The sent variable's name without a trainer's suffix: ``w@GRAD.block1``; in GEO, ``w.block1.delta``."""
    param: str
    param_shape: tuple[int, ...]
    dtype: str
    """The name of the torch dtype without its module, such as ``float32``."""
    index: int
    """The block's position among the blocks of its parameter."""
    begin: int
    """The index of the block's first element in the flattened parameter."""
    shape: tuple[int, ...]
    """The parameter's shape, with the first dimension reduced to this block's rows."""
    server: int
    """The index of the server that holds the block, in the plan's ``endpoints``."""
    endpoint: str
    group: int
    """The index of the parameter's param group in the optimizer."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """The index after the block's last element in the flattened parameter."""
        return self.begin + self.numel

    @property
    def sliced(self) -> bool:
        """True if the parameter is sliced into several blocks."""
        return self.name != self.param

    @property
    def suffix(self) -> str:
        """The part of the block's name after the parameter's name; empty if the parameter is not sliced."""
        return self.name[len(self.param) :]


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of a variable: whole rows, from element ``begin`` up to but excluding ``end``."""

    index: int
    begin: int
    end: int
    shape: tuple[int, ...]


def slice_variable(shape: tuple[int, ...], slice_count: int, min_block_size: int) -> tuple[Slice, ...]:
    """Slice a variable into at most `slice_count` blocks of similar size.

    Parameters
    ----------
    shape : tuple of int
        The variable's shape.
    slice_count : int
        The maximum number of blocks: the number of servers, or 1 to leave the variable whole.
    min_block_size : int
        The minimum number of elements in a block; a smaller variable stays whole.

    Returns
    -------
    tuple of Slice
        In order; together they hold each element exactly once.

    Notes
    -----
    The arithmetic is Paddle's: blocks have ``ceil(numel / count)`` elements, rounded up to
    whole rows for two or more dimensions. Because of the rounding there may be fewer blocks than
    `slice_count`.

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


def plan_block(
    parameter: ParameterSpec,
    piece: Slice,
    *,
    sliced: bool,
    geo: bool,
    number: int,
    server: int,
    endpoint: str,
) -> PlannedBlock:
    """Create a block from a slice of a parameter.

    Parameters
    ----------
    parameter : ParameterSpec
    piece : Slice
    sliced : bool
        Whether the parameter has several slices.
    geo : bool
        Whether trainers send a parameter's change instead of its gradient.
    number, server : int
        The block's id, and its server's index.
    endpoint : str
        The server's endpoint.
    """
    name = f"{parameter.name}.block{piece.index}" if sliced else parameter.name
    return PlannedBlock(
        id=number,
        name=name,
        grad=f"{name}.delta" if geo else parameter.grad + name.removeprefix(parameter.name),
        param=parameter.name,
        param_shape=parameter.shape,
        dtype=parameter.dtype,
        index=piece.index,
        begin=piece.begin,
        shape=piece.shape,
        server=server,
        endpoint=endpoint,
        group=parameter.group,
    )
