"""Plans: what the replicas of a job do, as data that follows from what is trained, by pure functions.

A plan says which blocks of which parameters go to which server, and how they are stepped. Whatever runs
follows one; nothing here opens a socket, starts a thread or reads a clock, and importing it loads no torch.
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
