"""The ports of a replica: those in the manifest or, on the host network, a block of its own.

Pods that share their node's network must not share ports. Each replica gets a block of the range by its index
in the job, so its peers know its ports before it exists and on any node. Jobs start at different
offsets of the range. Because the ports are part of the pod, the scheduler keeps pods with equal ports on
different nodes.

The division of the range may change, for example with a new version of the operator. The ledger therefore
stores the blocks that the job got at its start. If the ledger was lost, a replacement pod still listens on
the port that its peers know, because the operator reads that port from the peers' environment.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from fleet_operator.api import Mode, PortBlocks, Role
from fleet_operator.api.names import METRICS_PORT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet_operator.api import FleetJob

__all__ = ["ReplicaPorts", "assigned_ports", "first_ports", "listening_role", "port_blocks", "replica_ports"]

_PATTERN = re.compile(r"\[0-(\d+)\].*:\[(\d+)-\d+\+(\d+)\]", re.ASCII)
"""The pattern that `role_env` writes for thousands of endpoints with ports that differ by pod."""


class ReplicaPorts(NamedTuple):
    """The ports of a replica."""

    first: int  # a server's port, or the port of a pod's first process
    metrics: int


def listening_role(job: FleetJob) -> Role:
    """Return the role whose ports all replicas must know, because its replicas accept connections."""
    return Role.TRAINER if job.spec.mode is Mode.COLLECTIVE else Role.PSERVER


def replica_ports(job: FleetJob, role: Role, index: int, assigned: tuple[int, ...] = ()) -> ReplicaPorts:
    """Return the ports of a replica.

    Parameters
    ----------
    job : FleetJob
        The job.
    role, index : Role, int
        The replica.
    assigned : tuple of int
        The first port of each replica of the listening role, as stored in the job's pods
        (`assigned_ports`); empty without pods.

    Returns
    -------
    ReplicaPorts
        The ports, which stay the same throughout a life of the job.
    """
    blocks = port_blocks(job, role)
    if blocks is None:
        return ReplicaPorts(job.port(role), METRICS_PORT)
    first = blocks.first + index * blocks.apart
    if role is listening_role(job) and len(assigned) == job.replicas(role):
        first = assigned[index]
    return ReplicaPorts(first, first + blocks.apart - 1)


def port_blocks(job: FleetJob, role: Role) -> PortBlocks | None:
    """Return a role's host ports, from the ledger or newly chosen; None without the host network."""
    ports = job.host_ports
    if ports is None:
        return None
    if (recorded := job.status.ledger.role(role).ports) is not None:
        return recorded
    servers, width = job.replicas(Role.PSERVER), job.nproc_per_node + 1
    spare = (ports.last - ports.first + 1) // width - (servers + job.most_trainers)
    start = crc32(job.metadata.uid.encode()) % (spare + 1)
    place = start if role is Role.PSERVER else start + servers
    return PortBlocks(first=ports.first + place * width, apart=width)


def first_ports(job: FleetJob, role: Role, assigned: tuple[int, ...] = ()) -> list[int]:
    """Return the first port of each replica of a role."""
    if job.host_ports is not None and role is listening_role(job) and len(assigned) == job.replicas(role):
        return list(assigned)
    blocks = port_blocks(job, role)
    if blocks is None:
        return [job.port(role)] * job.replicas(role)
    return [blocks.first + index * blocks.apart for index in range(job.replicas(role))]


def assigned_ports(env: Mapping[str, str | None]) -> tuple[int, ...]:
    """Return each listening replica's first port, read from the environment of a pod."""
    listed = env.get("PADDLE_PSERVERS_IP_PORT_LIST") or env.get("PADDLE_TRAINER_ENDPOINTS") or ""
    slots = env.get("LOCAL_WORLD_SIZE") or "1"
    return _first_of_each(listed, int(slots)) if listed and slots.isdecimal() and int(slots) else ()


@lru_cache(maxsize=256)
def _first_of_each(listed: str, slots: int) -> tuple[int, ...]:
    """Return the port of each replica's first endpoint; cached, because a job's pods share one list."""
    if (pattern := _PATTERN.search(listed)) is not None:
        last, first, apart = (int(each) for each in pattern.groups())
        return tuple(range(first, first + last * apart + 1, apart))
    ports = [each.rpartition(":")[2] for each in listed.split(",")]
    return tuple(int(port) for port in ports[::slots]) if all(port.isdecimal() for port in ports) else ()
