"""The plans that replicas follow: what each trainer sends, and what each server holds and steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from fleet.plan.agreement import fingerprint_of
from fleet.plan.blocks import PlannedBlock
from fleet.plan.clipping import ClippingPlan
from fleet.plan.config import DistributedMode, TrainingMode
from fleet.plan.optimizers import HyperParameter
from fleet.plan.placement import Placement, blocks_told, part_of
from fleet.plan.tables import TablePlan, shards_on

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["GroupPlan", "ServerPlan", "TrainerPlan"]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How the parameters of one param group are stepped."""

    index: int
    optimizer_class: "type[Optimizer]"
    hyper_parameters: Mapping[str, HyperParameter]
    """Every option of the group at capture, ``lr``, ``weight_decay`` and kernel flags included."""
    elementwise: bool
    """Whether stepping two slices gives the bits that stepping the whole parameter gives."""
    cuttable: bool
    """Whether the mode and the clipping too let blocks be sent and stepped in pieces."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """The options that are tensors where the user has them, and their dtypes, which decide bits of a step."""


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
    """All blocks of the job, by parameter name and then by offset; once joined, those that servers hold."""
    send_order: tuple[int, ...]
    """Block ids in the order of the program's send operators. An eager loop may send in another."""
    agreement: Mapping[str, str]
    """What every process of the job must have in common, by name, for messages."""
    merge_add: frozenset[int]
    """The param groups whose gradients are summed, not averaged, when those of several steps are merged."""
    push_nums: int
    """GEO: after how many steps a trainer sends what has changed."""
    custom: TrainingMode | None
    """The user's own mode, which takes the place of `mode`."""
    tables: tuple[TablePlan, ...] = ()
    """The tables that live on the servers, each on all of them."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of `agreement`: equal on all processes that may work together."""
        return fingerprint_of(self.agreement)

    def placed(self, told: Sequence[Placement]) -> "TrainerPlan":
        """Return the plan for the blocks that servers hold, which they tell; see `blocks_told`."""
        runs = blocks_told(self.blocks, self.endpoints, told)
        param_of = {block.id: block.param for block in self.blocks}
        sent = (runs[param] for param in dict.fromkeys(param_of[number] for number in self.send_order))
        return replace(
            self,
            blocks=tuple(chain.from_iterable(runs.values())),
            send_order=tuple(block.id for block in chain.from_iterable(sent)),
        )

    def blocks_of(self, param: str) -> tuple[PlannedBlock, ...]:
        """Return the blocks of one parameter in order of offset."""
        return tuple(block for block in self.blocks if block.param == param)

    def blocks_on(self, server: int) -> tuple[PlannedBlock, ...]:
        """Return the blocks that one server owns, in order."""
        return tuple(block for block in self.blocks if block.server == server)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What one server holds and steps."""

    mode: DistributedMode
    server: int
    """This server's index in `endpoints`."""
    endpoints: tuple[str, ...]
    trainers: int
    """Fanin: the number of trainers, which is also the divisor of the summed gradients."""
    blocks: tuple[PlannedBlock, ...]
    """The blocks this server owns, or their pieces, in that order; empty when it owns none."""
    num_blocks: int
    """How many blocks the whole job has, however they are cut into pieces."""
    groups: Mapping[int, GroupPlan]
    """The param groups that `blocks` refer to, by index."""
    clipping: ClippingPlan
    agreement: Mapping[str, str]
    """As in `TrainerPlan`."""
    custom: TrainingMode | None
    """As in `TrainerPlan`."""
    version: int = 0
    """Of the placement; see `Placement`."""
    tables: tuple[TablePlan, ...] = ()
    """As in `TrainerPlan`; of each this server holds some shards."""

    @property
    def dc_asgd(self) -> bool:
        """Whether gradients are compensated for their delay."""
        return self.agreement.get("enable_dc_asgd") == str(True)

    @property
    def endpoint(self) -> str:
        """Where this server is reached."""
        return self.endpoints[self.server]

    @property
    def table_shards(self) -> tuple[int, ...]:
        """The virtual shards of every table that this server holds."""
        return shards_on(self.server, len(self.endpoints))

    @property
    def fingerprint(self) -> str:
        """As of `TrainerPlan`."""
        return fingerprint_of(self.agreement)

    @property
    def placement(self) -> Placement:
        """What this server tells each trainer of its blocks."""
        return Placement(tuple(map(part_of, self.blocks)), self.version)
