"""Which ports a replica listens on: the manifest's, or its own share of its node's.

Pods that share their node's network must not share ports. Every replica gets as many of the range in a row as
it can need, by its place in the job, so its peers know them before it exists, on whatever node it will run.
Jobs begin at different places of one range; and because the ports are written into the pod, the scheduler
puts no pod where another one has them already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from fleet_operator.api import Role
from fleet_operator.api.names import METRICS_PORT

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

__all__ = ["ReplicaPorts", "first_ports", "replica_ports"]


class ReplicaPorts(NamedTuple):
    """The ports of one replica."""

    first: int  # of its role: a server's own, or the first of a pod's processes
    metrics: int


def replica_ports(job: FleetJob, role: Role, index: int) -> ReplicaPorts:
    """Return the ports of one replica.

    Parameters
    ----------
    job : FleetJob
        The job.
    role, index : Role, int
        Which replica.

    Returns
    -------
    ReplicaPorts
        Always the same for the same replica of the same job.
    """
    ports = job.host_ports
    if ports is None:
        return ReplicaPorts(job.port(role), METRICS_PORT)
    servers, width = job.replicas(Role.PSERVER), job.slots_per_pod + 1
    place = index if role is Role.PSERVER else servers + index
    spare = (ports.last - ports.first + 1) // width - (servers + job.most_trainers)
    start = crc32(job.metadata.uid.encode()) % (spare + 1)
    first = ports.first + (start + place) * width
    return ReplicaPorts(first, first + width - 1)


def first_ports(job: FleetJob, role: Role) -> list[int]:
    """Return the first port of each replica of a role that the job has, as `replica_ports` has it."""
    first = replica_ports(job, role, 0).first
    apart = 0 if job.host_ports is None else job.slots_per_pod + 1
    return [first + index * apart for index in range(job.replicas(role))]
