"""The ledger: the part of a status that only the operator reads, stored as one opaque field.

Its fields are not part of the API: the schema does not list them, and a version of the operator may add
fields. Each version keeps the fields that it does not know, so that a newer version still finds them after a
rollback.
"""

# No `from __future__ import annotations` here: pydantic reads the annotations when the class is made.
from typing import Any

from pydantic import Field

from fleet_operator.api.base import StatusModel, Timestamp

__all__ = ["PortBlocks", "QuotaBackOff", "ReplicaRestarts", "StoredLedger", "StoredRole"]


class ReplicaRestarts(StatusModel):
    """The restarts of a single replica, which do not include restarts of the whole job."""

    index: int
    count: int
    not_before: Timestamp | None = None  # back-off: its next pod waits for this time
    # Its consecutive failures, which lengthen its pauses; reset once it has run for 10 minutes.
    failures_in_a_row: int | None = None
    unseen: bool | None = None  # whether the end of the previous pod was not observed


class PortBlocks(StatusModel):
    """The host-network ports of a role's replicas: consecutive blocks of ports, one block per replica."""

    first: int  # the first port of replica 0
    apart: int  # the number of ports in each block


class StoredRole(StatusModel):
    """The history of a role's replicas, with lists of replicas in the form ``0-2,4``."""

    restarts: tuple[ReplicaRestarts, ...] = ()  # of the replicas that were restarted alone
    created: str = ""  # replicas whose present pod has been observed
    refused: str = ""  # replicas whose latest pod was refused by a node with UnexpectedAdmissionError
    failed: str = ""  # replicas that have failed since incident_start
    # As at the job's start: the division of the range may differ in another build.
    ports: PortBlocks | None = None


class QuotaBackOff(StatusModel):
    """The back-off state of a job after a quota refused some of its pods."""

    refused_since: Timestamp | None = None  # since when pods are refused while the job has others
    not_before: Timestamp | None = None  # the job has released its pods: new ones wait for this time
    times: int = 0  # how often the job has released its pods since it last had enough of them to run


class StoredLedger(StatusModel):
    """The history of a job, as `fleet_operator.plan.observe.attempts` reads and writes it."""

    incident_start: Timestamp | None = None  # the time of the latest counted failure
    disrupted: Timestamp | None = None  # the time of the latest counted disruption
    not_before: Timestamp | None = None  # back-off: new pods wait for this time
    # Consecutive failures that have restarted the whole job, which lengthen its pauses.
    failures_in_a_row: int = 0
    unseen_restarts: int = 0  # the latest consecutive restarts of the job after unobserved ends
    quota_back_off: QuotaBackOff | None = None
    queued_since: Timestamp | None = None  # since when Kueue holds the job back
    admitted: Timestamp | None = None  # when Kueue last admitted it
    # When somebody deactivated the job's Workload; kept until the job is suspended.
    deactivated: Timestamp | None = None
    queue_name: str | None = None  # the LocalQueue from the job's label, as it was when the job started
    roles: dict[str, StoredRole] = Field(default_factory=dict)

    def role(self, role: str) -> StoredRole:
        """Return the history of a role, or an empty one if there is none."""
        return self.roles.get(role, StoredRole())

    def to_manifest(self) -> dict[str, Any]:
        """Return the fields that differ from a new job's ledger."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
