"""The replicas of a job in its present life, and the pods that are theirs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fleet_operator.api import Role
from fleet_operator.api.names import pod_name
from fleet_operator.plan.late import find_nobody, late_trainers
from fleet_operator.plan.ledger import Ledger, Replica
from fleet_operator.plan.pods import has_started, is_up

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from fleet_operator.api import FleetJob
    from fleet_operator.plan.model import Observed, ObservedPod

__all__ = ["Replicas"]


@dataclass(frozen=True)
class Replicas:
    """Which replicas are wanted, and which of the pods that are there is whose."""

    job: FleetJob
    ledger: Ledger
    observed: Observed

    @cached_property
    def wanted(self) -> tuple[Replica, ...]:
        """Every replica that the job wants, in the order in which they are created."""
        return tuple(each for each in self._pods if each not in self.late)

    @cached_property
    def present(self) -> dict[Replica, ObservedPod]:
        """The pods of the replicas' present attempts."""
        pods = self._pods.items()
        return {replica: pod for replica, pod in pods if pod is not None and replica not in self.late}

    @cached_property
    def departed(self) -> dict[Replica, ObservedPod]:
        """The pods of the replicas' present attempts that were seen to be deleted, as they were last."""
        found = {(pod.name, pod.attempt): pod for pod in self.observed.departed}
        known = ((each, found.get((self.name_of(each), self.ledger.attempt(each)))) for each in self._pods)
        return {replica: pod for replica, pod in known if pod is not None}

    @cached_property
    def _pods(self) -> dict[Replica, ObservedPod | None]:
        """Every replica that the job asks for, and the pod of its present attempt."""
        asked_for = (Replica(role, i) for role in self.job.roles for i in range(self.job.replicas(role)))
        found = {(pod.name, pod.attempt): pod for pod in self.observed.pods if pod.owned}
        return {each: found.get((self.name_of(each), self.ledger.attempt(each))) for each in asked_for}

    @cached_property
    def late(self) -> frozenset[Replica]:
        """Trainers of an elastic job that come too late, and are not wanted any more."""
        return late_trainers(self._pods, self.ledger) if self.job.elastic else frozenset()

    @cached_property
    def ended_late(self) -> tuple[ObservedPod, ...]:
        """The pods of trainers that came too late and have ended: they are kept as those of the others."""
        found = (self._pods[each] for each in sorted(self.late))
        return tuple(pod for pod in found if pod is not None and has_started(pod))

    @cached_property
    def past(self) -> tuple[ObservedPod, ...]:
        """The job's own pods that are not wanted: those of older attempts, and those that never join."""
        kept = {pod.uid for pod in (*self.present.values(), *self.ended_late)}
        return tuple(pod for pod in self.observed.pods if pod.owned and pod.uid not in kept)

    @cached_property
    def missing(self) -> tuple[Replica, ...]:
        """Replicas that have no present pod and should have one."""
        absent = (each for each in self.wanted if each not in self.present)
        return tuple(each for each in absent if not self.ledger.has_completed(each))

    @cached_property
    def finding_nobody(self) -> frozenset[Replica]:
        """Replicas that have found no peers, or will not."""
        seen = {**self.departed, **self.present}
        servers = (each for each in seen if each.role is Role.PSERVER and self.ledger.has_completed(each))
        pods = {each: self.present.get(each) for each in self.wanted}
        return find_nobody(pods, (seen[each] for each in servers))

    @cached_property
    def stranded(self) -> tuple[Replica, ...]:
        """Trainers that are started again and find no servers any more, as these have ended well.

        Servers wait for every trainer, so each of them had told them that it was done before it failed.
        """
        ledger = self.ledger
        if not ledger.roles[Role.PSERVER].completed:
            return ()
        trainers = (each for each in self.wanted if each.role is Role.TRAINER)
        again = (each for each in trainers if ledger.is_replaced(each) and not ledger.has_completed(each))
        return tuple(each for each in again if each in self.finding_nobody)

    def name_of(self, replica: Replica) -> str:
        """Return the name of a replica's pod."""
        return pod_name(self.job.name, replica.role, replica.index)

    def has_vanished(self, replica: Replica) -> bool:
        """Whether a replica's present pod had been seen and is gone, though nobody here deleted it."""
        seen = replica.index in self.ledger.roles[replica.role].created
        return seen and replica not in self.present and not self.ledger.has_completed(replica)

    def has_started(self, replica: Replica) -> bool:
        """Whether a replica has got as far as to run, or has completed."""
        pod = self.present.get(replica)
        return self.ledger.has_completed(replica) or (pod is not None and has_started(pod))

    def has_run(self, replica: Replica) -> bool:
        """Whether the main container of a replica's pod runs or has run."""
        pod = self.present.get(replica)
        return pod is not None and (is_up(pod) or pod.started_at is not None or pod.exit_code is not None)

    def time_run(self, replica: Replica, now: datetime) -> timedelta | None:
        """Return how long the main container of a replica's pod has run, or ran, if anybody knows."""
        pod = self.present.get(replica) or self.departed.get(replica)
        if pod is None or pod.started_at is None:
            return None
        return (pod.finished_at or now) - pod.started_at

    def runs(self, replica: Replica) -> bool:
        """Whether a replica runs or has completed."""
        pod = self.present.get(replica)
        return self.ledger.has_completed(replica) or (pod is not None and is_up(pod))

    def is_ready(self, replica: Replica) -> bool:
        """Whether a replica is ready or has completed."""
        pod = self.present.get(replica)
        return self.ledger.has_completed(replica) or (pod is not None and pod.ready)
