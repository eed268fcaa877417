"""Blocks: the contiguous runs of a parameter's elements, in row-major order, that travel and are stepped.

A parameter is sliced along its first dimension, so that several servers share the work; each slice, or the
whole parameter where it is not sliced, is one block.
"""

from dataclasses import dataclass
from math import prod

from fleet.plan.spec import ParameterSpec

__all__ = ["PlannedBlock", "Slice", "plan_block", "slice_variable"]


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """One block: where its elements lie in the parameter, and which server owns it."""

    id: int
    """The same number on every trainer and server: a block's position among all blocks of the job."""
    name: str
    """``w.block1``, or the parameter's own name where it is not sliced."""
    grad: str
    """What is sent for it, without a trainer's suffix: ``w@GRAD.block1``, or ``w.block1.delta`` in GEO."""
    param: str
    param_shape: tuple[int, ...]
    dtype: str
    """The torch dtype's name without its module: ``float32``."""
    index: int
    """Position among the blocks of its parameter."""
    begin: int
    """First element in the flattened parameter."""
    shape: tuple[int, ...]
    """The parameter's shape with the first dimension cut to this block's rows."""
    server: int
    """Index of the owning server in the plan's ``endpoints``."""
    endpoint: str
    group: int
    """Index of the optimizer's param group."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """One past the last element in the flattened parameter."""
        return self.begin + self.numel

    @property
    def sliced(self) -> bool:
        """Whether its parameter is cut into several blocks."""
        return self.name != self.param

    @property
    def suffix(self) -> str:
        """What the block's name adds to the parameter's; empty where it is not sliced."""
        return self.name[len(self.param) :]


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
    """Return the block of one slice of a parameter.

    Parameters
    ----------
    parameter : ParameterSpec
    piece : Slice
    sliced : bool
        Whether the parameter has several slices.
    geo : bool
        Whether trainers send a parameter's change in place of its gradient.
    number, server : int
        The block's id, and the index of its server.
    endpoint : str
        Its server's.
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
