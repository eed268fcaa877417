"""Lowering: from the operators of a transpiled program to the flat plan that the runtime follows.

A block is one contiguous run of a parameter's elements, seen in row-major order. It is what travels and
what a server steps. Both sides number the blocks alike: a block's id is its position in the list of all
blocks of the job, sorted by parameter name (code points) and then by offset.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from fleet.transpiler.config import DistributedMode

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["GroupPlan", "HyperParameter", "PlannedBlock", "ServerPlan", "TrainerPlan"]

HyperParameter = bool | int | float | str | tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """One block: where its elements lie in the parameter, and which server owns it."""

    id: int
    """Position among all blocks of the job; the same number on every trainer and server."""
    name: str
    """``w.block1``, or the parameter's own name where it is not sliced."""
    grad: str
    """The gradient's name without a trainer's suffix: ``w@GRAD.block1``."""
    param: str
    param_shape: tuple[int, ...]
    dtype: str
    """The torch dtype's name without its module: ``float32``."""
    index: int
    """Position among the blocks of its parameter."""
    begin: int
    """First element in the flattened parameter."""
    end: int
    """One past the last element in the flattened parameter."""
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


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How the parameters of one param group are stepped."""

    index: int
    optimizer_class: "type[Optimizer]"
    hyper_parameters: Mapping[str, HyperParameter]
    """Every option of the group at capture, ``lr``, ``weight_decay`` and kernel flags included."""
    elementwise: bool
    """Whether stepping two slices gives the bits that stepping the whole parameter gives."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """What one trainer sends and receives at each step."""

    mode: DistributedMode
    trainer_id: int
    trainers: int
    endpoints: tuple[str, ...]
    wait_port: bool
    """Whether to wait until every server accepts connections before the first step."""
    blocks: tuple[PlannedBlock, ...]
    """All blocks of the job; ``blocks[i].id == i``."""
    send_order: tuple[int, ...]
    """Block ids in the order of the program's send operators. An eager loop may send in another."""
    agreement: Mapping[str, str]
    """What every process of the job must have in common, by name, for messages."""
    fingerprint: str
    """Hex digest of `agreement`: equal on all processes that may work together."""

    def blocks_of(self, param: str) -> tuple[PlannedBlock, ...]:
        """Return the blocks of one parameter in order of offset."""
        return tuple(block for block in self.blocks if block.param == param)

    def blocks_on(self, server: int) -> tuple[PlannedBlock, ...]:
        """Return the blocks that one server owns, in order of id."""
        return tuple(block for block in self.blocks if block.server == server)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What one server holds and steps."""

    mode: DistributedMode
    endpoint: str
    server: int
    """Index of `endpoint` in `endpoints`."""
    endpoints: tuple[str, ...]
    trainers: int
    """Fanin: the number of trainers, which is also the divisor of the summed gradients."""
    blocks: tuple[PlannedBlock, ...]
    """The blocks this server owns, in order of id; empty when it owns none."""
    groups: Mapping[int, GroupPlan]
    """The param groups that `blocks` refer to, by index."""
    agreement: Mapping[str, str]
    """As in `TrainerPlan`."""
    fingerprint: str
