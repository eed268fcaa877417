"""Pieces: the runs of a block that travel, are stepped and are answered on their own.

A large block keeps the network idle: nothing of it can be answered before the last trainer has sent the last
byte of it. Where an optimizer computes element by element, cutting a block changes no bit of the result. What
programs, checkpoints and messages call a block stays the block.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import gcd, prod
from typing import Final, TypeVar

from fleet.parameter_server.settings import Settings
from fleet.parameter_server.transport.arena import dtype_of
from fleet.transpiler.block import PlannedBlock
from fleet.transpiler.config import DistributedMode
from fleet.transpiler.lowering import ServerPlan, TrainerPlan

__all__ = ["by_block", "in_pieces", "lead_bytes"]

Plan = TypeVar("Plan", TrainerPlan, ServerPlan)

_PIECE_BYTES: Final = 1 << 18
_VECTOR: Final = 64
"""Pieces hold a multiple of so many elements: kernels may round otherwise what does not fill a vector."""


def in_pieces(plan: Plan, settings: Settings) -> Plan:
    """Cut the blocks of a plan; trainers and servers cut alike.

    Parameters
    ----------
    plan : TrainerPlan or ServerPlan
    settings : Settings
        Their `piece_bytes` say how large a piece may be. Without, it is 256 KiB, and blocks stay whole where
        every server has an address of the loopback interface: copies are the limit there, and not a network.
        A row is never cut, so one that is larger is a piece of its own.

    Returns
    -------
    TrainerPlan or ServerPlan
        With the pieces in place of the blocks.
    """
    most_bytes = _most_bytes(plan, settings)
    if most_bytes is None:
        return plan
    if isinstance(plan, ServerPlan):
        pieces = _Cutter(plan.cuttable, plan.num_blocks, most_bytes).cut_all(plan.blocks)
        ranges = {piece.id: bounds for block, bounds in plan.ranges.items() for piece in pieces[block]}
        return replace(plan, blocks=_flat(pieces.values()), ranges=ranges)
    pieces = _Cutter(plan.cuttable, len(plan.blocks), most_bytes).cut_all(plan.blocks)
    order = _flat(pieces[block] for block in plan.send_order)
    return replace(plan, blocks=_flat(pieces.values()), send_order=tuple(piece.id for piece in order))


def lead_bytes(plan: ServerPlan, settings: Settings) -> int | None:
    """Return by how much a trainer's gradients may be ahead of another's; None where it does not matter.

    It does where everybody's gradient of a piece is waited for.
    """
    in_step = plan.mode is DistributedMode.SYNC and plan.custom is None
    return _most_bytes(plan, settings) if in_step else None


def _most_bytes(plan: TrainerPlan | ServerPlan, settings: Settings) -> int | None:
    """Return how large a piece may be; None where blocks stay whole."""
    if settings.piece_bytes is None and all(_is_loopback(endpoint) for endpoint in plan.endpoints):
        return None
    return settings.piece_bytes or _PIECE_BYTES


def by_block(pieces: Iterable[PlannedBlock]) -> list[list[PlannedBlock]]:
    """Return the pieces of each block together; they follow each other in a plan."""
    return [list(of_block) for _, of_block in groupby(pieces, key=lambda piece: piece.name)]


@dataclass(frozen=True, slots=True)
class _Cutter:
    cuttable: frozenset[int]
    num_blocks: int
    most_bytes: int

    def cut_all(self, blocks: Sequence[PlannedBlock]) -> dict[int, tuple[PlannedBlock, ...]]:
        return {block.id: self._cut(block) for block in blocks}

    def _cut(self, block: PlannedBlock) -> tuple[PlannedBlock, ...]:
        """Cut a block into runs of whole rows; both ends number them alike."""
        if block.group not in self.cuttable or not block.shape or not block.numel:
            return (block,)
        rows, row = block.shape[0], prod(block.shape[1:])
        together = _VECTOR // gcd(_VECTOR, row)
        most_rows = self.most_bytes // (row * dtype_of(block.dtype).itemsize)
        step = max(1, most_rows // together) * together
        bounds = [*range(0, rows, step), rows]
        return tuple(
            replace(
                block,
                id=block.id + index * self.num_blocks,
                begin=block.begin + first * row,
                shape=(last - first, *block.shape[1:]),
            )
            for index, (first, last) in enumerate(pairwise(bounds))
        )


def _flat(groups: Iterable[Sequence[PlannedBlock]]) -> tuple[PlannedBlock, ...]:
    return tuple(piece for group in groups for piece in group)


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
