"""Pods as the operator builds them, and access to the parts that tests check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet_operator.api import Role
from fleet_operator.build import ClusterHosts, build_pod
from fleet_operator.plan.model import Attempt
from tests.support import jobs

if TYPE_CHECKING:
    from collections.abc import Mapping

Manifest = dict[str, Any]


def template(*containers: Manifest, metadata: Manifest | None = None, **spec: Any) -> Manifest:
    """Return a pod template with the given containers, which by default have fleet's name and image."""
    filled = [{"name": "fleet", "image": "example.com/trainer:1"} | each for each in containers or ({},)]
    return {"spec": {"containers": filled, **spec}} | ({"metadata": metadata} if metadata else {})


def pod_of(role: Role = Role.TRAINER, document: Manifest | None = None, **spec: Any) -> Manifest:
    """Return a role's first pod in the job `document`, or else in the default job with `spec` fields set."""
    job = jobs.job(document or jobs.manifest(**spec))
    return build_pod(job, role, 0, Attempt(), ClusterHosts(job))


def main_of(pod: Manifest) -> Manifest:
    """Return the main container of a pod, which is the first one in these tests."""
    main: Manifest = pod["spec"]["containers"][0]
    return main


def env_of(container: Mapping[str, Any]) -> dict[str, str | None]:
    """Return a container's environment variables; the value is None if the variable refers to a source."""
    return {each["name"]: each.get("value") for each in container["env"]}
