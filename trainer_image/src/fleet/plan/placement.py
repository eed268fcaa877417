"""The placement of parameters on servers, which servers announce to trainers.

Servers hold whole blocks or pieces of blocks. A trainer checks that the announced parts cover its parameters.
It then slices its gradients into these parts, even if its own plan differs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Final

from fleet.errors import ConfigurationError
from fleet.plan.blocks import PlannedBlock

__all__ = ["Part", "Placement", "announced_blocks", "part_of"]

_REMEDY: Final = "; run one script with the same settings on all parameter servers"


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous range of a parameter on one server: a block or a piece of a block."""

    block: int
    """The part's number in frames and calls."""
    name: str
    """The name of the part's block, such as ``w.block1``; all pieces of a block share it."""
    index: int
    """The position of the part's block among the parameter's blocks."""
    param: str
    dtype: str
    """The torch dtype's name without its module."""
    begin: int
    """The index of the part's first element in the flattened parameter."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The blocks and pieces on one server.

    Attributes
    ----------
    parts : tuple of Part
    version : int
        Version of the placement; equal on all servers, and higher after each change.
    """

    parts: tuple[Part, ...]
    version: int = 0


def part_of(block: PlannedBlock) -> Part:
    """Return the part that announces a block to trainers."""
    return Part(block.id, block.name, block.index, block.param, block.dtype, block.begin, block.shape)


def announced_blocks(
    own: Iterable[PlannedBlock], endpoints: Sequence[str], announced: Sequence[Placement]
) -> dict[str, tuple[PlannedBlock, ...]]:
    """Convert the parts that servers announce to a trainer's blocks.

    Parameters
    ----------
    own : iterable of PlannedBlock
        The blocks of the trainer's own plan.
    endpoints : sequence of str
        The servers' endpoints.
    announced : sequence of Placement
        The placement that each server announced, in the order of `endpoints`.

    Returns
    -------
    dict of str to tuple of PlannedBlock
        By parameter, sorted by name, and by offset within each.

    Raises
    ------
    ConfigurationError
        The servers announced different versions, or do not hold each element of each parameter exactly once
        and in the parameter's dtype.
    """
    if len({each.version for each in announced}) > 1:
        pairs = zip(endpoints, announced, strict=True)
        versions = ", ".join(f"{endpoint} of {each.version}" for endpoint, each in pairs)
        raise ConfigurationError(
            f"the parameter servers announce different placement versions: {versions}; expected the same on "
            "all. Restart all of them"
        )
    trained = {block.param: block for block in own}
    blocks = [
        _block(trained, part, server, endpoints[server])
        for server, each in enumerate(announced)
        for part in each.parts
    ]
    blocks.sort(key=lambda block: (block.param, block.begin, block.end))
    runs = {param: tuple(run) for param, run in groupby(blocks, key=lambda block: block.param)}
    for block in trained.values():
        _check_whole(block, runs.get(block.param, ()))
    if len({block.id for block in blocks}) < len(blocks):
        raise ConfigurationError(f"the parameter servers announce two blocks with the same id{_REMEDY}")
    return runs


def _block(own: Mapping[str, PlannedBlock], part: Part, server: int, endpoint: str) -> PlannedBlock:
    """Convert a part to a block of this trainer; `own` contains the trainer's planned blocks by parameter."""
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
    """Check that the parts of a parameter cover its elements without gaps or overlaps."""
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
