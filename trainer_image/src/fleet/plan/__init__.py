"""Plans: data that describes the work of a job's replicas, computed from a specification by pure functions.

A plan assigns the blocks of each parameter to servers, and describes how they are updated. The runtime
follows a plan. This package opens no socket, starts no thread and reads no clock, and importing it does not
import torch.
"""

from fleet.plan.agreement import describe_difference, facts_of_training, fingerprint_of
from fleet.plan.blocks import PlannedBlock
from fleet.plan.clipping import (
    ClipGradByGlobalNorm,
    ClipGradByNorm,
    ClipGradByValue,
    ClippingPlan,
    GradClip,
    NormPlan,
)
from fleet.plan.config import DistributedMode, DistributeTranspilerConfig
from fleet.plan.dispatch import HashName, PSDispatcher, RoundRobin
from fleet.plan.job import GroupPlan, ServerPlan, TrainerPlan
from fleet.plan.optimizers import HyperParameter
from fleet.plan.placement import Part, Placement
from fleet.plan.source import Source

__all__ = [
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "ClippingPlan",
    "DistributeTranspilerConfig",
    "DistributedMode",
    "GradClip",
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
    "Source",
    "TrainerPlan",
    "describe_difference",
    "facts_of_training",
    "fingerprint_of",
]
