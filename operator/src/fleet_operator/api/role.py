"""The two roles of a FleetJob's replicas."""

from enum import StrEnum

__all__ = ["Role"]


class Role(StrEnum):
    """What a replica is; the value is the one in pod names and labels."""

    PSERVER = "pserver"
    TRAINER = "trainer"
