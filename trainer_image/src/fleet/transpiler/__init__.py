"""The distribute transpiler: one captured Program in, the programs of every replica out.

Pure: it opens no socket, starts no thread and reads no clock; and it imports no torch.
"""

from fleet.transpiler.block import PlannedBlock
from fleet.transpiler.clipping import ClippingPlan, NormPlan
from fleet.transpiler.config import DistributedMode, DistributeTranspilerConfig
from fleet.transpiler.dispatch import HashName, PSDispatcher, RoundRobin
from fleet.transpiler.lowering import (
    GroupPlan,
    HyperParameter,
    ServerPlan,
    TrainerPlan,
    server_plan,
    startup_plan,
    trainer_plan,
)
from fleet.transpiler.placement import Part, Placement
from fleet.transpiler.transpiler import DistributeTranspiler

__all__ = [
    "ClippingPlan",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "DistributedMode",
    "GroupPlan",
    "HashName",
    "HyperParameter",
    "NormPlan",
    "PSDispatcher",
    "Part",
    "Placement",
    "PlannedBlock",
    "RoundRobin",
    "ServerPlan",
    "TrainerPlan",
    "server_plan",
    "startup_plan",
    "trainer_plan",
]
