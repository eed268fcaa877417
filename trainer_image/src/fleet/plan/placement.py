"""Where the parts of parameters lie: a value that servers hand to each trainer that joins them.

What a server holds its own program says, in pieces or whole. A trainer cuts its gradients as the servers do,
whatever its own program says: it takes the parts that it is told, once they are all that it trains.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Final

from fleet.errors import ConfigurationError
from fleet.plan.blocks import PlannedBlock

__all__ = ["Part", "Placement", "blocks_told", "part_of"]

_REMEDY: Final = "; run one script with the same settings on all parameter servers"


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a parameter that lies on one server: a block, or a piece of one."""

    block: int
    """The number by which frames and calls name it."""
    name: str
    """Its block's: ``w.block1``; all pieces of a block have it."""
    index: int
    """Position of its block among those of the parameter."""
    param: str
    dtype: str
    """The torch dtype's name without its module."""
    begin: int
    """First element in the flattened parameter."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """What one server holds.

    Attributes
    ----------
    parts : tuple of Part
    version : int
        Of what lies where on all servers; rises with each change.
    """

    parts: tuple[Part, ...]
    version: int = 0


def part_of(block: PlannedBlock) -> Part:
    """Return what a server tells of one of its blocks."""
    return Part(block.id, block.name, block.index, block.param, block.dtype, block.begin, block.shape)


def blocks_told(
    own: Iterable[PlannedBlock], endpoints: Sequence[str], told: Sequence[Placement]
) -> dict[str, tuple[PlannedBlock, ...]]:
    """Return the blocks that servers hold, for a trainer with these of its own.

    Parameters
    ----------
    own : iterable of PlannedBlock
        As the trainer's program cuts the parameters.
    endpoints : sequence of str
        The servers'.
    told : sequence of Placement
        In the servers' order.

    Returns
    -------
    dict of str to tuple of PlannedBlock
        By parameter, in the order of the names, and of the offsets.

    Raises
    ------
    ConfigurationError
        The servers tell of different versions; or they do not hold each element of each parameter once, in
        the parameter's dtype.
    """
    if len({each.version for each in told}) > 1:
        pairs = zip(endpoints, told, strict=True)
        versions = ", ".join(f"{endpoint} of {each.version}" for endpoint, each in pairs)
        raise ConfigurationError(
            f"the parameter servers tell of different versions of what lies where: {versions}; expected one. "
            "Start all of them again"
        )
    trained = {block.param: block for block in own}
    blocks = [
        _block(trained, part, server, endpoints[server])
        for server, each in enumerate(told)
        for part in each.parts
    ]
    blocks.sort(key=lambda block: (block.param, block.begin, block.end))
    runs = {param: tuple(run) for param, run in groupby(blocks, key=lambda block: block.param)}
    for block in trained.values():
        _check_whole(block, runs.get(block.param, ()))
    if len({block.id for block in blocks}) < len(blocks):
        raise ConfigurationError(f"the parameter servers number two of their blocks alike{_REMEDY}")
    return runs


def _block(own: Mapping[str, PlannedBlock], part: Part, server: int, endpoint: str) -> PlannedBlock:
    """Return a part as a block of a trainer that has these."""
    trained = own.get(part.param)
    if trained is None or trained.dtype != part.dtype:
        found = "which this trainer does not train" if trained is None else f"expected {trained.dtype}"
        raise ConfigurationError(
            f"parameter server {endpoint} holds {part.name} as {part.dtype}, {found}{_REMEDY}"
        )
    return replace(
        trained,
        id=part.block,
        name=part.name,
        index=part.index,
        grad=_grad_of(trained, part.name),
        begin=part.begin,
        shape=part.shape,
        server=server,
        endpoint=endpoint,
    )


def _grad_of(trained: PlannedBlock, name: str) -> str:
    if trained.grad == f"{trained.name}.delta":
        return f"{name}.delta"
    return trained.grad.removesuffix(trained.suffix) + name.removeprefix(trained.param)


def _check_whole(trained: PlannedBlock, run: Sequence[PlannedBlock]) -> None:
    """Check that the parts of a parameter follow each other from its first element to its last."""
    end, numel = 0, prod(trained.param_shape)
    for block in run:
        if block.begin != end:
            break
        end = block.end
    else:
        if run and end == numel:
            return
    found = ", ".join(f"{each.begin} to {each.end} on {each.endpoint}" for each in run) or "none"
    raise ConfigurationError(
        f"the parameter servers hold these elements of {trained.param}: {found}; expected each from 0 to "
        f"{numel} once{_REMEDY}"
    )
