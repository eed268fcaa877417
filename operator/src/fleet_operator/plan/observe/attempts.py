"""The ledger: a job's history of restarts, failures and completions, stored in its status.

Counters only grow. A replica's attempt consists of two of them, so that pods of earlier attempts, and frames
that such a pod may still send, are always recognized as outdated:

- A restart of one replica increments the count of that replica.
- A restart of the whole job increments the count of the job, and forgets which pods were created and which
  replicas completed. The parameters and every trainer's share of the training start over. Within one life of
  the job, a completed replica never runs again. Completions are forgotten even if the job has a checkpoint,
  because new servers wait for every trainer. A suspension, a change in the number of trainers, and the
  release of pods under a quota are also restarts of the job.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from fleet_operator.api import ReplicaRestarts, Role, StoredLedger, StoredRole
from fleet_operator.plan.formats import format_indexes, parse_indexes, stamp
from fleet_operator.plan.model import Attempt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from fleet_operator.api import FleetJobStatus, PortBlocks, QuotaBackOff

__all__ = ["INCIDENT", "RANK_ZERO", "Ledger", "Replica", "RoleLedger"]

INCIDENT = timedelta(seconds=60)
"""How long after a counted failure the failures of other replicas belong to the same incident."""


@dataclass(frozen=True, order=True, slots=True)
class Replica:
    """A replica of a job, identified by its role and index."""

    role: Role
    index: int


RANK_ZERO = Replica(Role.TRAINER, 0)


@dataclass(frozen=True, slots=True)
class RoleLedger:
    """The history of one role's replicas."""

    restarts: Mapping[int, ReplicaRestarts] = field(default_factory=dict)
    created: frozenset[int] = frozenset()  # whose current pod was observed: if missing, it was deleted
    completed: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()  # the replicas that failed in the latest incident
    refused: frozenset[int] = frozenset()  # replicas whose latest pod was not admitted by a node
    ports: PortBlocks | None = None  # on their nodes' network, as at the job's start


@dataclass(frozen=True, slots=True)
class Ledger:
    """The history of a job: its restarts, failures, disruptions and completions."""

    job_restarts: int = 0
    restarts: int = 0
    failures: int = 0
    disruptions: int = 0
    disrupted: datetime | None = None  # the time of the latest counted disruption
    not_before: datetime | None = None
    quota: QuotaBackOff | None = None  # the back-off under a quota
    unseen_restarts: int = 0  # the latest consecutive restarts of the job after unobserved ends
    failures_in_a_row: int = 0  # consecutive failures that restarted the whole job
    incident: datetime | None = None  # the start of the latest incident, by the operator's clock
    queue_name: str | None = None  # Kueue's queue, from the job's label
    queued_since: datetime | None = None  # since when Kueue holds the job back, if it does
    admitted: datetime | None = None  # when Kueue last admitted the job
    deactivated: datetime | None = None  # when the job's Workload was deactivated; a suspension resets it
    roles: Mapping[Role, RoleLedger] = field(default_factory=dict)

    @classmethod
    def of(cls, status: FleetJobStatus) -> Self:
        """Read the ledger from a job's status."""
        roles = {}
        for role in Role:
            stored = status.ledger.role(role)
            roles[role] = RoleLedger(
                restarts={each.index: each for each in stored.restarts},
                created=parse_indexes(stored.created),
                completed=parse_indexes(status.role(role).completed_indexes),
                failed=parse_indexes(stored.failed),
                refused=parse_indexes(stored.refused),
                ports=stored.ports,
            )
        return cls(
            job_restarts=status.job_restarts,
            restarts=status.restarts,
            failures=status.failures,
            disruptions=status.disruptions,
            disrupted=status.ledger.disrupted,
            not_before=status.ledger.not_before,
            quota=status.ledger.quota_back_off,
            unseen_restarts=status.ledger.unseen_restarts,
            failures_in_a_row=status.ledger.failures_in_a_row,
            incident=status.ledger.incident_start,
            queue_name=status.ledger.queue_name,
            queued_since=status.ledger.queued_since,
            admitted=status.ledger.admitted,
            deactivated=status.ledger.deactivated,
            roles=roles,
        )

    def stored(self, before: StoredLedger) -> StoredLedger:
        """Return the ledger in the form stored in the next status, keeping unknown fields.

        The counters and the completions are in the status itself.
        """
        roles = {
            role.value: StoredRole(
                restarts=tuple(own.restarts[index] for index in sorted(own.restarts)),
                created=format_indexes(own.created),
                refused=format_indexes(own.refused),
                failed=format_indexes(own.failed),
                ports=own.ports,
                **before.role(role).extras,
            )
            for role, own in self.roles.items()
        }
        others = {role: kept for role, kept in before.roles.items() if role not in roles}
        return StoredLedger(
            incident_start=self.incident,
            disrupted=self.disrupted,
            not_before=self.not_before,
            failures_in_a_row=self.failures_in_a_row,
            unseen_restarts=self.unseen_restarts,
            quota_back_off=self.quota,
            queue_name=self.queue_name,
            queued_since=self.queued_since,
            admitted=self.admitted,
            deactivated=self.deactivated,
            roles={role: own for role, own in (roles | others).items() if own != StoredRole()},
            **before.extras,
        )

    @property
    def has_begun(self) -> bool:
        """True if any replica has been observed since the job's latest restart."""
        return any(own.created or own.completed for own in self.roles.values())

    @property
    def training(self) -> int:
        """The number of the restart with which the current training run began."""
        return self.job_restarts - min(self.unseen_restarts, self.job_restarts)

    def attempt(self, replica: Replica) -> Attempt:
        """Return the attempt that a replica's current pod must have."""
        restarts = self.roles[replica.role].restarts.get(replica.index)
        return Attempt(self.job_restarts, restarts.count if restarts else 0)

    def has_completed(self, replica: Replica) -> bool:
        """Return whether a replica has completed since the job's latest restart."""
        return replica.index in self.roles[replica.role].completed

    def is_replaced(self, replica: Replica) -> bool:
        """Return whether a replica was restarted since the job's latest restart.

        Only restarts in this life have a `not_before`.
        """
        restarts = self.roles[replica.role].restarts.get(replica.index)
        return restarts is not None and restarts.not_before is not None

    def may_have_ended(self, replica: Replica) -> bool:
        """Return whether a replica may have completed in an earlier pod whose end was not observed."""
        restarts = self.roles[replica.role].restarts.get(replica.index)
        if restarts is not None and restarts.not_before is not None:
            return bool(restarts.unseen)
        return self.unseen_restarts > 0

    def failures_in_a_row_of(self, replica: Replica) -> int:
        """Return a replica's number of consecutive failures since the job's latest restart."""
        restarts = self.roles[replica.role].restarts.get(replica.index)
        return (restarts.failures_in_a_row or 0) if restarts else 0

    def failed_in_incident(self, now: datetime) -> frozenset[Replica] | None:
        """Return the replicas that have failed in the current incident; None without an incident.

        An incident in the future was recorded before the clock was set back, and counts as over.
        """
        if self.incident is None or abs(stamp(now) - self.incident) > INCIDENT:
            return None
        return frozenset(Replica(role, index) for role, own in self.roles.items() for index in own.failed)

    def not_before_of(self, replica: Replica) -> datetime | None:
        """Return the earliest time at which a replica's next pod may be created, or None."""
        restarts = self.roles[replica.role].restarts.get(replica.index)
        own = restarts.not_before if restarts else None
        return max((each for each in (own, self.not_before) if each is not None), default=None)

    def with_attempts(self, seen: Iterable[tuple[Replica, Attempt]]) -> Self:
        """Return the ledger with restart counts raised to those in the labels of existing pods.

        If a status is older than its pods, it was reset by hand or restored from a backup. Its counts would
        replace running pods with older attempts, which their peers refuse. Its completions before the pods'
        restart do not count.
        """
        seen = tuple(seen)
        life = max((attempt.job for _, attempt in seen), default=0)
        begun = self
        if life > self.job_restarts:
            begun = replace(self.with_new_life(), job_restarts=life)
        roles = dict(begun.roles)
        for replica, attempt in seen:
            own = roles[replica.role]
            known = own.restarts.get(replica.index)
            if attempt.replica > (known.count if known else 0):
                seen_now = ReplicaRestarts(index=replica.index, count=attempt.replica)
                roles[replica.role] = replace(own, restarts={**own.restarts, replica.index: seen_now})
        return replace(begun, roles=roles)

    def with_ports(self, ports: Mapping[Role, PortBlocks | None]) -> Self:
        """Return the ledger with the given ports for each role's replicas."""
        roles = {role: replace(own, ports=ports.get(role)) for role, own in self.roles.items()}
        return replace(self, roles=roles)

    def with_seen(self, role: Role, created: frozenset[int], completed: frozenset[int]) -> Self:
        """Return the ledger with more replicas of a role recorded as created or completed."""
        own = self.roles[role]
        if own.created >= created and own.completed >= completed:
            return self
        own = replace(own, created=own.created | created, completed=own.completed | completed)
        return replace(self, roles={**self.roles, role: own})

    def with_replica_restart(
        self, replica: Replica, not_before: datetime, *, failures_in_a_row: int = 0, unseen: bool = False
    ) -> Self:
        """Return the ledger after a restart of one replica.

        Parameters
        ----------
        replica : Replica
            The replica.
        not_before : datetime
            When its next pod may be created.
        failures_in_a_row : int
            Its own consecutive failures, which determine the next pause.
        unseen : bool
            Whether its pod's end was not observed.
        """
        role, index = replica.role, replica.index
        own = self.roles[role]
        count = self.attempt(replica).replica + 1
        counted = ReplicaRestarts(
            index=index,
            count=count,
            not_before=not_before,
            failures_in_a_row=failures_in_a_row or None,
            unseen=unseen or None,
        )
        restarts = {**own.restarts, index: counted}
        own = replace(own, restarts=restarts, created=own.created - {index})
        return replace(self, restarts=self.restarts + 1, roles={**self.roles, role: own})

    def without_surplus(self, role: Role, wanted: int) -> Self:
        """Return the ledger without a role's surplus replicas, from index `wanted` on.

        If such a replica is needed again, its next pod has a later attempt.
        """
        own = self.roles[role]
        surplus = {index for index in own.created if index >= wanted}
        if not surplus:
            return self
        counts = {index: self.attempt(Replica(role, index)).replica + 1 for index in surplus}
        given_up = {index: ReplicaRestarts(index=index, count=count) for index, count in counts.items()}
        own = replace(own, restarts={**own.restarts, **given_up}, created=own.created - surplus)
        return replace(self, roles={**self.roles, role: own})

    def with_job_restart(
        self, not_before: datetime, *, failures_in_a_row: int = 0, unseen: bool = False
    ) -> Self:
        """Return the ledger after a restart of all replicas because of failures or unobserved ends."""
        return replace(
            self.with_new_life(),
            restarts=self.restarts + 1,
            not_before=not_before,
            failures_in_a_row=failures_in_a_row,
            unseen_restarts=self.unseen_restarts + 1 if unseen else 0,
        )

    def with_new_life(self) -> Self:
        """Return the ledger reset for a new start of all replicas.

        The replicas' counts stay, but the times of their next pods and their consecutive failures are
        forgotten.
        """
        roles = {
            role: replace(
                own,
                restarts={
                    index: ReplicaRestarts(index=index, count=each.count)
                    for index, each in own.restarts.items()
                },
                created=frozenset(),
                completed=frozenset(),
            )
            for role, own in self.roles.items()
        }
        return replace(
            self, job_restarts=self.job_restarts + 1, not_before=None, unseen_restarts=0, roles=roles
        )

    def with_refused(self, refused: Iterable[Replica], ran: Iterable[Replica]) -> Self:
        """Return the ledger with newly refused replicas added, and earlier ones that have run removed."""
        refused, ran = frozenset(refused), frozenset(ran)
        roles = {}
        for role, own in self.roles.items():
            before = {index for index in own.refused if Replica(role, index) not in ran}
            now = {each.index for each in refused if each.role is role}
            roles[role] = replace(own, refused=frozenset(before | now))
        return replace(self, roles=roles)

    def with_disruption(self, now: datetime) -> Self:
        """Return the ledger with one more disruption, counting at most one per minute."""
        if self.disrupted is not None and abs(stamp(now) - self.disrupted) <= INCIDENT:
            return self
        return replace(self, disruptions=self.disruptions + 1, disrupted=stamp(now))

    def with_failures(self, counted: int, failed: Iterable[Replica], now: datetime) -> Self:
        """Return the ledger with new failures recorded.

        Parameters
        ----------
        counted : int
            How many failures count against the limit. The first failure of an incident counts, and begins it.
        failed : iterable of Replica
            All failed replicas, including those of the current incident.
        now : datetime
            The time.
        """
        before = () if counted else self.failed_in_incident(now)
        if before is None:
            return self
        known = {*before, *failed}
        roles = {
            role: replace(own, failed=frozenset(each.index for each in known if each.role is role))
            for role, own in self.roles.items()
        }
        incident = stamp(now) if counted else self.incident
        return replace(self, failures=self.failures + counted, incident=incident, roles=roles)
