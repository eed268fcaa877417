"""The GPUs of this machine, and which of them each trainer of a run gets: a share, as on a cluster."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet_operator.api import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fleet_operator.api import FleetJob

__all__ = ["VISIBLE", "share_of", "too_few", "visible_gpus"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
_RESOURCE = "nvidia.com/gpu"
_DEVICE = re.compile(r"nvidia\d+")


def visible_gpus(environ: Mapping[str, str], devices: Iterable[str]) -> tuple[str, ...]:
    """Return the GPUs that a process of this environment sees, as `VISIBLE` names them.

    Parameters
    ----------
    environ : mapping
        `VISIBLE` in it chooses; without it all are seen.
    devices : iterable of str
        The names in /dev. CUDA counts anew those that there are: in a container a few of a node's.
    """
    if (chosen := environ.get(VISIBLE)) is not None:
        return tuple(each.strip() for each in chosen.split(",") if each.strip() not in ("", "-1"))
    return tuple(
        str(number) for number in range(sum(_DEVICE.fullmatch(name) is not None for name in devices))
    )


def too_few(gpus: Sequence[str], job: FleetJob) -> str:
    """Return a sentence where this machine has GPUs, but not one for each that the job asks for; else ''."""
    wanted = _each(job) * job.replicas(Role.TRAINER)
    if not 0 < len(gpus) < wanted:
        return ""
    return f"the trainers ask for {wanted} GPUs and this machine has {len(gpus)}: each of them sees all"


def share_of(gpus: Sequence[str], job: FleetJob, role: Role, index: int) -> dict[str, str]:
    """Return what lets a replica see its own GPUs only; nothing where it asks for none, or there are too few.

    Parameters
    ----------
    gpus : sequence of str
        As of `visible_gpus`.
    job : FleetJob
        The job; `nodePool.gpusPerTrainer` counts for NVIDIA's, and the limit of the trainer's template.
    role, index : Role, int
        The replica.
    """
    each = _each(job)
    if role is not Role.TRAINER or each == 0 or len(gpus) < each * job.replicas(role):
        return {}
    return {VISIBLE: ",".join(gpus[each * index : each * (index + 1)])}


def _each(job: FleetJob) -> int:
    """Return how many of NVIDIA's GPUs a trainer's main container asks for: the pool's word wins."""
    pool = job.spec.node_pool
    if pool is not None and pool.gpus_per_trainer and pool.resource_name == _RESOURCE:
        return pool.gpus_per_trainer
    resources = job.template(Role.TRAINER).main_container.resources
    asked = str((resources.limits or {}).get(_RESOURCE, 0)) if resources is not None else "0"
    return int(asked) if asked.isdecimal() else 0
