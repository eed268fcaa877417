"""Where replicas are reached, known before any of them exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fleet_operator.api.names import cluster_host

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob, Role

__all__ = ["ClusterHosts", "Hosts"]


class Hosts(Protocol):
    """Anything that maps a replica to its host: a name or an address, without a port."""

    def __call__(self, role: Role, index: int, /) -> str:
        """Return the host of one replica; always the same string for the same replica."""


@dataclass(frozen=True, slots=True)
class ClusterHosts:
    """The replicas' DNS names under the job's headless Service."""

    job: FleetJob

    def __call__(self, role: Role, index: int, /) -> str:
        """Return ``{pod}.{service}.{namespace}.svc``."""
        return cluster_host(self.job.name, self.job.metadata.namespace, role, index)
