"""A block: one contiguous run of a parameter's elements, seen in row-major order.

It is what travels and what a server steps. The layout makes the blocks of a job, and lowering reads the same
ones back from a program's operators.
"""

from dataclasses import dataclass
from math import prod

from fleet.program.ir import Variable
from fleet.transpiler.slicing import Slice

__all__ = ["PlannedBlock", "plan_block"]


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


def plan_block(
    param: Variable,
    grad: str,
    piece: Slice,
    *,
    sliced: bool,
    geo: bool,
    number: int,
    group: int,
    server: int,
    endpoint: str,
) -> PlannedBlock:
    """Return the block that a slice of a parameter is.

    Parameters
    ----------
    param : Variable
    grad : str
        The name of the whole parameter's gradient.
    piece : Slice
    sliced : bool
        Whether it is one of several.
    geo : bool
        Whether trainers send what has changed in place of gradients.
    number, group, server : int
        The block's id, its param group and the index of its server.
    endpoint : str
        Its server's.
    """
    suffix = f".block{piece.index}" if sliced else ""
    return PlannedBlock(
        id=number,
        name=param.name + suffix,
        grad=f"{param.name}{suffix}.delta" if geo else grad + suffix,
        param=param.name,
        param_shape=param.shape,
        dtype=param.dtype,
        index=piece.index,
        begin=piece.begin,
        shape=piece.shape,
        server=server,
        endpoint=endpoint,
        group=group,
    )
