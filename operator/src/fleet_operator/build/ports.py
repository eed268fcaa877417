"""Which ports a replica listens on: the manifest's, or its own share of its node's.

Pods that share their node's network must not share ports. Every replica gets as many of the range in a row as
it can need, by its place in the job, so its peers know them before it exists, on whatever node it will run.
Jobs begin at different places of one range; and because the ports are written into the pod, the scheduler
puts no pod where another one has them already.

Where the range is divided in another way, by another version of the operator for example, a pod that takes
another's place still listens where its peers were told to call: that is read from the peers' environment.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from fleet_operator.api import Mode, Role
from fleet_operator.api.names import METRICS_PORT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet_operator.api import FleetJob

__all__ = ["ReplicaPorts", "first_ports", "listening_role", "replica_ports", "told_ports"]

_PATTERN = re.compile(r"\[0-(\d+)\].*:\[(\d+)-\d+\+(\d+)\]", re.ASCII)
"""The endpoints of thousands of processes whose ports differ from pod to pod, as `role_env` lists them."""


class ReplicaPorts(NamedTuple):
    """The ports of one replica."""

    first: int  # of its role: a server's own, or the first of a pod's processes
    metrics: int


def listening_role(job: FleetJob) -> Role:
    """Return the role whose replicas are called by the others, so that everybody is told their ports."""
    return Role.TRAINER if job.spec.mode is Mode.COLLECTIVE else Role.PSERVER


def replica_ports(job: FleetJob, role: Role, index: int, told: tuple[int, ...] = ()) -> ReplicaPorts:
    """Return the ports of one replica.

    Parameters
    ----------
    job : FleetJob
        The job.
    role, index : Role, int
        Which replica.
    told : tuple of int
        The first port of each replica of the listening role, as the job's pods have been told them
        (`told_ports`); empty where no pod is there.

    Returns
    -------
    ReplicaPorts
        Always the same for the same replica of the same life of a job.
    """
    ports = job.host_ports
    if ports is None:
        return ReplicaPorts(job.port(role), METRICS_PORT)
    servers, width = job.replicas(Role.PSERVER), job.slots_per_pod + 1
    if role is listening_role(job) and len(told) == job.replicas(role):
        return ReplicaPorts(told[index], told[index] + width - 1)
    place = index if role is Role.PSERVER else servers + index
    spare = (ports.last - ports.first + 1) // width - (servers + job.most_trainers)
    start = crc32(job.metadata.uid.encode()) % (spare + 1)
    first = ports.first + (start + place) * width
    return ReplicaPorts(first, first + width - 1)


def first_ports(job: FleetJob, role: Role, told: tuple[int, ...] = ()) -> list[int]:
    """Return the first port of each replica of a role that the job has, as `replica_ports` has it."""
    if job.host_ports is not None and role is listening_role(job) and len(told) == job.replicas(role):
        return list(told)
    first = replica_ports(job, role, 0).first
    apart = 0 if job.host_ports is None else job.slots_per_pod + 1
    return [first + index * apart for index in range(job.replicas(role))]


def told_ports(env: Mapping[str, str | None]) -> tuple[int, ...]:
    """Return the first port of each replica that listens, from what `role_env` has told a pod."""
    listed = env.get("PADDLE_PSERVERS_IP_PORT_LIST") or env.get("PADDLE_TRAINER_ENDPOINTS") or ""
    slots = env.get("LOCAL_WORLD_SIZE") or "1"
    return _first_of_each(listed, int(slots)) if listed and slots.isdecimal() and int(slots) else ()


@lru_cache(maxsize=256)
def _first_of_each(listed: str, slots: int) -> tuple[int, ...]:
    """Return the port of every endpoint that begins a replica. Pods of one job share list and answer."""
    if (pattern := _PATTERN.search(listed)) is not None:
        last, first, apart = (int(each) for each in pattern.groups())
        return tuple(range(first, first + last * apart + 1, apart))
    ports = [each.rpartition(":")[2] for each in listed.split(",")]
    return tuple(int(port) for port in ports[::slots]) if all(port.isdecimal() for port in ports) else ()
