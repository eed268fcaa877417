"""Pieces: parts of a block that are sent, updated and answered independently.

A large block would leave the network idle, because a server cannot answer any part of it before the last
trainer has sent its last byte. If the optimizer works element by element, updating pieces gives a
bitwise-identical result. Programs, checkpoints and messages name blocks, never pieces.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, groupby, pairwise
from math import gcd, prod
from typing import Final

from fleet.parameter_server.settings import Settings
from fleet.parameter_server.transport.arena import dtype_of
from fleet.plan.blocks import PlannedBlock
from fleet.plan.job import ServerPlan

__all__ = ["by_block", "in_pieces", "lead_bytes"]

# Measured with links as the limit, as a fraction of what they allow: four trainers reach .88 with 256 KiB and
# .84 with 512 KiB, eight trainers .82 with 128 KiB and .79 with 256 KiB.
_OF_ALL_BYTES: Final = 1 << 20
_LEAST_BYTES, _MOST_BYTES = 1 << 17, 1 << 18
_VECTOR: Final = 64
"""The unit of the sizes of all pieces but a block's last one, because kernels may round partial vectors."""


def in_pieces(plan: ServerPlan, settings: Settings) -> ServerPlan:
    """Return a server's plan with its blocks sliced into pieces. Trainers receive this plan when they join.

    Parameters
    ----------
    plan : ServerPlan
    settings : Settings
        `piece_bytes` limits the size of a piece. The default is 256 KiB; with more than four trainers it is
        1 MiB divided by their number, but at least 128 KiB. If every server has a loopback address, blocks
        stay whole by default, because copies are then the bottleneck, not the network. Rows are never split:
        a row that is larger than the limit is one piece.

    Returns
    -------
    ServerPlan
        The plan with the pieces in place of the blocks.
    """
    most_bytes = _most_bytes(plan, settings)
    if most_bytes is None:
        return plan
    pieces = {
        block.id: _cut(block, plan.num_blocks, most_bytes) if _is_cuttable(plan, block) else (block,)
        for block in plan.blocks
    }
    ranges = {piece.id: bounds for block, bounds in plan.clipping.ranges.items() for piece in pieces[block]}
    return replace(
        plan,
        blocks=tuple(chain.from_iterable(pieces.values())),
        clipping=replace(plan.clipping, ranges=ranges),
    )


def lead_bytes(plan: ServerPlan, settings: Settings) -> int | None:
    """Return how many bytes a trainer may send ahead of another, or None if there is no limit.

    Only the sync mode has a limit, because only it waits for every trainer's gradient before it updates a
    piece.
    """
    return _most_bytes(plan, settings) if plan.has_common_step else None


def _most_bytes(plan: ServerPlan, settings: Settings) -> int | None:
    """Return the maximum size of a piece in bytes, or None if blocks are not sliced."""
    if settings.piece_bytes is None and all(_is_loopback(endpoint) for endpoint in plan.endpoints):
        return None
    return settings.piece_bytes or max(_LEAST_BYTES, min(_MOST_BYTES, _OF_ALL_BYTES // plan.trainers))


def by_block(pieces: Iterable[PlannedBlock]) -> list[list[PlannedBlock]]:
    """Group pieces by block; the plan lists the pieces of a block consecutively."""
    return [list(of_block) for _, of_block in groupby(pieces, key=lambda piece: piece.name)]


def _is_cuttable(plan: ServerPlan, block: PlannedBlock) -> bool:
    return block.group in plan.groups and plan.groups[block.group].cuttable


def _cut(block: PlannedBlock, num_blocks: int, most_bytes: int) -> tuple[PlannedBlock, ...]:
    """Slice a block into pieces of whole rows, with piece numbers that are unique within the job."""
    if not block.shape or not block.numel:
        return (block,)
    rows, row = block.shape[0], prod(block.shape[1:])
    together = _VECTOR // gcd(_VECTOR, row)
    most_rows = most_bytes // (row * dtype_of(block.dtype).itemsize)
    step = max(1, most_rows // together) * together
    bounds = [*range(0, rows, step), rows]
    return tuple(
        replace(
            block,
            # Blocks have numbers below `num_blocks`, so the first piece keeps that of its block, and no two
            # are equal.
            id=block.id + index * num_blocks,
            begin=block.begin + first * row,
            shape=(last - first, *block.shape[1:]),
        )
        for index, (first, last) in enumerate(pairwise(bounds))
    )


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
