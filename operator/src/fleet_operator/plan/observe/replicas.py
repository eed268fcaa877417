"""The job's current replicas and their pods, including replicas that cannot find their peers.

Servers wait for every trainer that has joined them, and then succeed. A trainer that starts later finds no
peer. An elastic job no longer needs such a trainer, and any other job restarts all replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from fleet_operator.api import Role
from fleet_operator.api.names import pod_name
from fleet_operator.plan.observe.attempts import RANK_ZERO, Ledger, Replica
from fleet_operator.plan.observe.pods import EXIT_PEER_LOST, has_started, has_succeeded, is_up
from fleet_operator.plan.observe.termination_message import parse_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime, timedelta

    from fleet_operator.api import FleetJob
    from fleet_operator.plan.model import Observed, ObservedPod

__all__ = ["Replicas", "find_nobody", "late_trainers"]


@dataclass(frozen=True)
class Replicas:
    """The replicas that the job needs, and their pods."""

    job: FleetJob
    ledger: Ledger
    observed: Observed

    @cached_property
    def wanted(self) -> tuple[Replica, ...]:
        """All needed replicas, in order of creation."""
        return tuple(each for each in self._pods if each not in self.late) if self.late else tuple(self._pods)

    @cached_property
    def present(self) -> dict[Replica, ObservedPod]:
        """The existing pods of the replicas' current attempts."""
        pods = self._pods.items()
        return {replica: pod for replica, pod in pods if pod is not None and replica not in self.late}

    @cached_property
    def departed(self) -> dict[Replica, ObservedPod]:
        """The last known states of deleted pods of the replicas' current attempts."""
        if not self.observed.departed:
            return {}
        found = {(pod.name, pod.attempt): pod for pod in self.observed.departed}
        known = ((each, found.get((self.name_of(each), self.ledger.attempt(each)))) for each in self._pods)
        return {replica: pod for replica, pod in known if pod is not None}

    @cached_property
    def _pods(self) -> dict[Replica, ObservedPod | None]:
        """Every replica in the manifest, with its current pod or None."""
        found = {(pod.name, pod.attempt): pod for pod in self.observed.pods if pod.owned}
        attempt = self.ledger.attempt
        return {each: found.get((name, attempt(each))) for each, name in self._names.items()}

    @cached_property
    def _names(self) -> Mapping[Replica, str]:
        """Every replica in the manifest, with the name of its pod."""
        return _names_of(self.job.name, tuple((role, self.job.replicas(role)) for role in self.job.roles))

    @cached_property
    def late(self) -> frozenset[Replica]:
        """The trainers of an elastic job that started too late and are no longer needed."""
        return late_trainers(self._pods, self.ledger) if self.job.elastic else frozenset()

    @cached_property
    def ended_late(self) -> tuple[ObservedPod, ...]:
        """The pods of late trainers that have started; they are kept like other trainers' pods."""
        found = (self._pods[each] for each in sorted(self.late))
        return tuple(pod for pod in found if pod is not None and has_started(pod))

    @cached_property
    def past(self) -> tuple[ObservedPod, ...]:
        """The job's pods that are no longer needed: older attempts, and trainers that never joined."""
        kept = {pod.uid for pod in (*self.present.values(), *self.ended_late)}
        return tuple(pod for pod in self.observed.pods if pod.owned and pod.uid not in kept)

    @cached_property
    def missing(self) -> tuple[Replica, ...]:
        """The replicas that need a pod but do not have one."""
        absent = (each for each in self.wanted if each not in self.present)
        return tuple(each for each in absent if not self.ledger.has_completed(each))

    @cached_property
    def finding_nobody(self) -> frozenset[Replica]:
        """The replicas that cannot find their peers now or once they start."""
        seen = {**self.departed, **self.present}
        servers = (each for each in seen if each.role is Role.PSERVER and self.ledger.has_completed(each))
        pods = {each: self.present.get(each) for each in self.wanted}
        return find_nobody(pods, (seen[each] for each in servers))

    @cached_property
    def stranded(self) -> tuple[Replica, ...]:
        """The restarted trainers that find no servers, because the servers have already succeeded.

        Because servers wait for every trainer, each of these had reported its completion before it failed.
        """
        ledger = self.ledger
        if not ledger.roles[Role.PSERVER].completed:
            return ()
        trainers = (each for each in self.wanted if each.role is Role.TRAINER)
        again = (each for each in trainers if ledger.is_replaced(each) and not ledger.has_completed(each))
        return tuple(each for each in again if each in self.finding_nobody)

    def name_of(self, replica: Replica) -> str:
        """Return the name of a replica's pod."""
        return self._names.get(replica) or pod_name(self.job.name, replica.role, replica.index)

    @cached_property
    def unbegun(self) -> tuple[Replica, ...]:
        """The replicas that have not run since the job's latest restart, except those whose pods vanished."""
        rest = (
            each for each in self.wanted if not self.has_started(each) and not self.ledger.is_replaced(each)
        )
        return tuple(each for each in rest if not self.has_vanished(each))

    def has_vanished(self, replica: Replica) -> bool:
        """Return whether a replica has not completed, but its pod existed and is now gone."""
        seen = replica.index in self.ledger.roles[replica.role].created
        return seen and replica not in self.present and not self.ledger.has_completed(replica)

    def has_started(self, replica: Replica) -> bool:
        """Return whether a replica has run or completed."""
        pod = self.present.get(replica)
        return self.ledger.has_completed(replica) or (pod is not None and has_started(pod))

    def has_run(self, replica: Replica) -> bool:
        """Return whether the main container of a replica's pod is running or has run."""
        pod = self.present.get(replica)
        return pod is not None and (is_up(pod) or pod.started_at is not None or pod.exit_code is not None)

    def time_run(self, replica: Replica, now: datetime) -> timedelta | None:
        """Return how long the main container of a replica's pod has run, if known."""
        pod = self.present.get(replica) or self.departed.get(replica)
        if pod is None or pod.started_at is None:
            return None
        return (pod.finished_at or now) - pod.started_at

    def runs(self, replica: Replica) -> bool:
        """Return whether a replica is running or has completed."""
        pod = self.present.get(replica)
        return self.ledger.has_completed(replica) or (pod is not None and is_up(pod))

    def is_ready(self, replica: Replica) -> bool:
        """Return whether a replica is ready or has completed."""
        pod = self.present.get(replica)
        return self.ledger.has_completed(replica) or (pod is not None and pod.ready)


@lru_cache(maxsize=8)
def _names_of(job: str, roles: tuple[tuple[Role, int], ...]) -> Mapping[Replica, str]:
    """Return the pod name of each replica of a job; cached, because a pass needs the names repeatedly."""
    return {
        Replica(role, index): pod_name(job, role, index) for role, number in roles for index in range(number)
    }


def late_trainers(pods: Mapping[Replica, ObservedPod | None], ledger: Ledger) -> frozenset[Replica]:
    """Return the trainers of an elastic job that had not joined before the others completed.

    Trainer 0 must have completed. A running trainer that finds no servers exits with code 91, which counts as
    late once the servers have succeeded or have no trainer left. A trainer that has not started when the
    servers have ended finds none either. Trainers that had joined are not late, because the servers waited
    for them. Trainers that failed so soon before the servers' end that the servers cannot have treated them
    as lost are not late either.

    Parameters
    ----------
    pods : mapping of Replica to ObservedPod or None
        Every replica in the manifest, and the pod of its current attempt.
    ledger : Ledger
        The job's history.
    """
    if not ledger.has_completed(RANK_ZERO):
        return frozenset()
    trainers = {each: pod for each, pod in pods.items() if each.role is Role.TRAINER}
    rest = {each: pod for each, pod in trainers.items() if not ledger.has_completed(each)}
    lost = {each for each, pod in rest.items() if pod is not None and pod.exit_code == EXIT_PEER_LOST}
    if not ledger.roles[Role.PSERVER].completed:
        return frozenset(lost) if lost == rest.keys() else frozenset()
    unbegun = {each for each, pod in rest.items() if pod is None or not has_started(pod)}
    servers = [pod for each, pod in pods.items() if each.role is Role.PSERVER and pod is not None]
    return frozenset(each for each in lost | unbegun if not _failed_when_done(each, servers, ledger))


def _failed_when_done(trainer: Replica, servers: list[ObservedPod], ledger: Ledger) -> bool:
    """Return whether a trainer failed so shortly before the servers' success that it must have completed.

    The servers had no time to treat the trainer as lost: they ended before its next pod could be created, and
    that pause is shorter than their deadline.
    """
    if not ledger.is_replaced(trainer):
        return False
    again = ledger.not_before_of(trainer)
    ends = (pod.finished_at for pod in servers if has_succeeded(pod))
    return again is not None and any(end is not None and end < again for end in ends)


def find_nobody(
    pods: Mapping[Replica, ObservedPod | None], servers: Iterable[ObservedPod]
) -> frozenset[Replica]:
    """Return the replicas that cannot find their peers now or once they start.

    Such a replica has not started, or its peers ended before it joined them. A server that succeeded reports
    the restart count of each trainer that it knew. A later attempt of that trainer has not joined the server,
    and connects to a closed port.

    Parameters
    ----------
    pods : mapping of Replica to ObservedPod or None
        Every needed replica, and the pod of its current attempt.
    servers : iterable of ObservedPod
        The pods of the servers that have completed.
    """
    known = [parse_words(server.message).restarts for server in servers if has_succeeded(server)]
    return frozenset(each for each, pod in pods.items() if _finds_nobody(each, pod, known))


def _finds_nobody(replica: Replica, pod: ObservedPod | None, known: Iterable[Mapping[int, int]]) -> bool:
    """Return whether a replica cannot find its peers, given the restart counts that each server reported."""
    if pod is None or not has_started(pod):
        return True
    if pod.exit_code is not None or replica.role is Role.PSERVER:
        return pod.exit_code == EXIT_PEER_LOST
    restarts = pod.attempt.restarts
    return any(said.get(replica.index, restarts) < restarts for said in known)
