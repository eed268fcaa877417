"""Which variables of a job's templates the environment of its roles replaces: nobody shall set one in vain.

They are no mistake that a job is refused for: manifests made for other operators set ``POD_IP`` and the like.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import Role
from fleet_operator.build.env import role_env
from fleet_operator.build.hosts import ClusterHosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleet_operator.api import FleetJob

__all__ = ["overwritten_sentence"]


def overwritten_sentence(job: FleetJob) -> str | None:
    """Name the variables that templates set and replicas get from the job instead, or None where none is."""
    fields = dict.fromkeys(field for role in job.roles for field in _overwritten(job, role))
    if not fields:
        return None
    return (
        f"{', '.join(fields)}: the job tells each replica its place by this name itself, and the template's"
        " value is not used; remove it from the template, or give it another name"
    )


def _overwritten(job: FleetJob, role: Role) -> Iterator[str]:
    """Give what the template of a role sets in vain, as ``FIELD (NAME)``."""
    names = role_env(job, role, 0, ClusterHosts(job)).keys()
    part = job.spec.trainer if role is Role.TRAINER else job.spec.pserver
    shared = part is None or part.template is None
    path = f"spec.{'' if shared else f'{role.value}.'}template.spec"
    spec = job.template(role).spec
    for kind, containers in (("initContainers", spec.init_containers), ("containers", spec.containers)):
        for index, container in enumerate(containers or ()):
            for position, variable in enumerate(container.env or ()):
                if variable.name in names:
                    yield f"{path}.{kind}[{index}].env[{position}] ({variable.name})"
