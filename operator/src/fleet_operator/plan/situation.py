"""One job at one moment, put in order for the policies: what is wanted, what is there, what has happened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from fleet_operator.api import Role
from fleet_operator.api.names import pod_name, service_name
from fleet_operator.build import build_extras
from fleet_operator.plan.extras import cannot_make, unserved
from fleet_operator.plan.key import brings_own_key, key_of_life
from fleet_operator.plan.ledger import RANK_ZERO, Ledger, Replica
from fleet_operator.plan.node_loss import is_on_silent_node, lost_at
from fleet_operator.plan.pods import EXIT_PEER_LOST, has_ended, has_started, has_succeeded, is_up
from fleet_operator.plan.scaling import trainers_to_have
from fleet_operator.plan.words import parse_words

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from fleet_operator.api import FleetJob
    from fleet_operator.build import Extra, Hosts
    from fleet_operator.plan.model import Observed, ObservedPod

__all__ = ["Situation"]


@dataclass(frozen=True)
class Situation:
    """All that decisions are made from."""

    job: FleetJob
    observed: Observed
    now: datetime
    hosts: Hosts
    ledger: Ledger
    asked: int  # how many trainers the manifest asks for; the job has fewer when some come too late

    def with_ledger(self, ledger: Ledger) -> Self:
        """Return the same moment with another ledger, by which other pods are the present ones."""
        return replace(self, ledger=ledger)

    def with_trainers_to_have(self) -> Self:
        """Return the same moment of an elastic job with as many trainers as it can have now."""
        before = self.job.status.role(Role.TRAINER).replicas
        any_completed = bool(self.ledger.roles[Role.TRAINER].completed)
        number = trainers_to_have(asked=self.asked, before=before, any_completed=any_completed)
        ledger = self.ledger.without_surplus(Role.TRAINER, number)
        return replace(self, job=self.job.with_trainers(number), ledger=ledger)

    @cached_property
    def replicas(self) -> tuple[Replica, ...]:
        """Every replica that the job wants, in the order in which they are created."""
        return tuple(each for each in self._asked_for if each not in self.late)

    @cached_property
    def present(self) -> dict[Replica, ObservedPod]:
        """The pods of the replicas' present attempts."""
        return {replica: pod for replica, pod in self._found.items() if replica not in self.late}

    @cached_property
    def departed(self) -> dict[Replica, ObservedPod]:
        """The pods of the replicas' present attempts that were seen to be deleted, as they were last."""
        wanted = {(self.name_of(each), self.ledger.attempt(each)): each for each in self._asked_for}
        found = {(pod.name, pod.attempt): pod for pod in self.observed.departed}
        return {replica: found[key] for key, replica in wanted.items() if key in found}

    @cached_property
    def late(self) -> frozenset[Replica]:
        """Trainers of an elastic job that have not joined before the others were done.

        Trainer 0 has completed then. Who runs says by its exit code that it found nobody any more, which
        counts once the servers have ended well or nobody is left for whom they stay; who has not begun to run
        once they have ended finds nobody either. One that had joined has been waited for by the servers, and
        so had one that failed so shortly before their end that they cannot have given it up.
        """
        if not self.job.elastic or not self.has_completed(RANK_ZERO):
            return frozenset()
        trainers = (each for each in self._asked_for if each.role is Role.TRAINER)
        rest = {each: self._found.get(each) for each in trainers if not self.has_completed(each)}
        lost = {each for each, pod in rest.items() if pod is not None and pod.exit_code == EXIT_PEER_LOST}
        if not self.ledger.roles[Role.PSERVER].completed:
            return frozenset(lost) if lost == rest.keys() else frozenset()
        unbegun = {each for each, pod in rest.items() if pod is None or not has_started(pod)}
        return frozenset(each for each in lost | unbegun if not self._failed_when_done(each))

    @cached_property
    def stranded(self) -> tuple[Replica, ...]:
        """Trainers that are started again and find no servers any more, as these have ended well.

        Servers wait for every trainer, so each of them had told them that it was done before it failed.
        """
        if not self.ledger.roles[Role.PSERVER].completed:
            return ()
        trainers = (each for each in self.replicas if each.role is Role.TRAINER)
        return tuple(
            each
            for each in trainers
            if self.ledger.is_replaced(each) and not self.has_completed(each) and self._finds_nobody(each)
        )

    def _finds_nobody(self, replica: Replica) -> bool:
        """Whether a replica has found no peers, or will not: it has not begun, or they have ended before.

        A server that ended well says after how many restarts it knew a trainer: a later start of that has
        not joined it, and calls a port on which nobody listens.
        """
        pod = self.present.get(replica)
        if pod is None or not has_started(pod):
            return True
        if pod.exit_code is not None or replica.role is Role.PSERVER:
            return pod.exit_code == EXIT_PEER_LOST
        restarts = pod.attempt.restarts
        return any(said.get(replica.index, restarts) < restarts for said in self._known_to_servers)

    @cached_property
    def _known_to_servers(self) -> tuple[Mapping[int, int], ...]:
        """After how many restarts trainers have completed, as each server says that has ended well."""
        seen = {**self.departed, **self.present}
        servers = (
            pod for each, pod in seen.items() if each.role is Role.PSERVER and self.has_completed(each)
        )
        return tuple(parse_words(pod.message).restarts for pod in servers if has_succeeded(pod))

    def _failed_when_done(self, trainer: Replica) -> bool:
        """Whether a trainer failed so shortly before servers ended well that it was done with them.

        They had no time to give it up: they ended before its next pod might come, and the pause before that
        is shorter than their patience.
        """
        if not self.ledger.is_replaced(trainer):
            return False
        again = self.ledger.not_before_of(trainer)
        servers = (pod for each, pod in self._found.items() if each.role is Role.PSERVER)
        ends = (pod.finished_at for pod in servers if has_succeeded(pod))
        return again is not None and any(end is not None and end < again for end in ends)

    def may_have_run(self, trainer: Replica) -> bool:
        """Whether a trainer runs or has run in the present life of the job, or may have, unseen."""
        if self.has_started(trainer) or self.ledger.is_replaced(trainer):
            return True
        last = self.departed.get(trainer)
        gone = self._is_recorded(trainer) and trainer not in self.present
        return gone and (last is None or has_started(last))

    def _is_recorded(self, replica: Replica) -> bool:
        """Whether a replica's present pod has been seen at some time."""
        return replica.index in self.ledger.roles[replica.role].created

    @cached_property
    def _asked_for(self) -> tuple[Replica, ...]:
        return tuple(Replica(role, i) for role in self.job.roles for i in range(self.job.replicas(role)))

    @cached_property
    def _found(self) -> dict[Replica, ObservedPod]:
        wanted = {(self.name_of(each), self.ledger.attempt(each)): each for each in self._asked_for}
        found = {(pod.name, pod.attempt): pod for pod in self.observed.pods if pod.owned}
        return {replica: found[key] for key, replica in wanted.items() if key in found}

    @cached_property
    def ended_late(self) -> tuple[ObservedPod, ...]:
        """The pods of trainers that came too late and have ended: they are kept as those of the others."""
        found = (self._found.get(each) for each in sorted(self.late))
        return tuple(pod for pod in found if pod is not None and has_started(pod))

    @cached_property
    def past(self) -> tuple[ObservedPod, ...]:
        """The job's own pods that are not wanted: those of older attempts, and those that never join."""
        kept = {pod.uid for pod in (*self.present.values(), *self.ended_late)}
        return tuple(pod for pod in self.observed.pods if pod.owned and pod.uid not in kept)

    @cached_property
    def names_taken(self) -> frozenset[str]:
        """The names of all pods that are there, whoever owns them."""
        return frozenset(pod.name for pod in self.observed.pods)

    @cached_property
    def foreign(self) -> tuple[str, ...]:
        """Objects that have names of this job's but belong to somebody else, as ``Kind/name``."""
        pods = (f"Pod/{pod.name}" for pod in self.observed.pods if not pod.owned)
        wanted = {f"Pod/{self.name_of(each)}" for each in self.replicas}
        wanted |= {f"{each.manifest['kind']}/{each.manifest['metadata']['name']}" for each in self.extras}
        wanted.add(f"Service/{service_name(self.job.name)}")  # what only has our labels takes no name
        return tuple(sorted(({*self.observed.foreign, *pods} & wanted) - {*self.observed.left_over}))

    @cached_property
    def names_blocked(self) -> bool:
        """Whether anything that is not this job's has a name that it needs."""
        return bool(self.foreign or self.observed.left_over)

    @cached_property
    def extras(self) -> tuple[Extra, ...]:
        """What the present life of the job needs beside its pods and its Service."""
        seen = self.observed
        readers, everybody = seen.metrics_readers, seen.metrics_open
        built = build_extras(self.job, self.ledger.job_restarts, readers=readers, metrics_open=everybody)
        return tuple(each for each in built if not (each.by_default and cannot_make(each, seen)))

    @cached_property
    def unserved(self) -> Extra | None:
        """An object that the job needs and the operator is not set up to make."""
        return unserved(self.extras, self.observed)

    @cached_property
    def vanished(self) -> tuple[Replica, ...]:
        """Replicas whose present pod had been seen and is gone, though nobody here deleted it."""
        return tuple(
            replica
            for replica in self.replicas
            if self._is_recorded(replica) and not self.has_completed(replica) and replica not in self.present
        )

    @cached_property
    def missing(self) -> tuple[Replica, ...]:
        """Replicas that have no present pod and should have one."""
        return tuple(
            each for each in self.replicas if each not in self.present and not self.has_completed(each)
        )

    @cached_property
    def key(self) -> tuple[str | None, bool]:
        """The key of the present life, if the operator has one for it, and whether no pod has it yet."""
        if brings_own_key(self.job):
            return None, False
        own = (pod for pod in self.observed.pods if pod.owned)
        return key_of_life(own, self.ledger.job_restarts, self.observed.new_key)

    @property
    def may_have_served(self) -> bool:
        """Whether a server that has ended well can have done its part.

        Every trainer must have run, in this pod of its or in one before; in an elastic job trainer 0, as the
        others may have come too late.
        """
        first = self.present.get(RANK_ZERO)
        done = self.has_completed(RANK_ZERO) or (first is not None and has_succeeded(first))
        trainers = (each for each in self.replicas if each.role is Role.TRAINER)
        ran = all(self.may_have_run(each) for each in trainers)
        return ran or (self.job.elastic and done)

    @cached_property
    def any_trainer_started(self) -> bool:
        """Whether a trainer of the present life of the job has got as far as to run."""
        return any(self.has_started(each) for each in self.replicas if each.role is Role.TRAINER)

    @cached_property
    def silent_nodes(self) -> dict[Replica, datetime | None]:
        """Replicas whose node has gone silent, and when each is given up, if it is."""
        return {
            replica: lost_at(pod, self.tolerations(replica.role))
            for replica, pod in self.present.items()
            if is_on_silent_node(pod)
        }

    @cached_property
    def disturbed(self) -> frozenset[Replica]:
        """Replicas that are being evicted or deleted, or whose node has gone silent."""
        return frozenset(
            replica
            for replica, pod in self.present.items()
            if pod.disruption or pod.deleted_at or is_on_silent_node(pod)
        )

    @cached_property
    def all_up(self) -> bool:
        """Whether every replica runs or has completed."""
        return all(self.runs(each) for each in self.replicas)

    @cached_property
    def enough_up(self) -> bool:
        """Whether an elastic job trains without those that do not run: all servers and enough trainers do."""
        up = [each for each in self.replicas if self.runs(each)]
        trainers = sum(each.role is Role.TRAINER for each in up)
        all_servers = len(up) - trainers == self.job.replicas(Role.PSERVER)
        return self.job.elastic and all_servers and trainers >= self.job.least_trainers

    def name_of(self, replica: Replica) -> str:
        """Return the name of a replica's pod."""
        return pod_name(self.job.name, replica.role, replica.index)

    def has_completed(self, replica: Replica) -> bool:
        """Whether a replica has done its part in the present life of the job."""
        return replica.index in self.ledger.roles[replica.role].completed

    def has_started(self, replica: Replica) -> bool:
        """Whether a replica has got as far as to run in the present life of the job."""
        return self.has_completed(replica) or (replica in self.present and has_started(self.present[replica]))

    def peers_run(self, replica: Replica) -> bool:
        """Whether all replicas but this one have got as far as to run, so that it waits for no start."""
        return all(self.has_started(each) for each in self.replicas if each != replica)

    def is_unseen(self, replica: Replica) -> bool:
        """Whether a replica may have ended unseen: it has no pod, or had none when it was replaced."""
        if self.has_completed(replica):
            return False
        pod = self.present.get(replica)
        if pod is not None:  # one that runs says so itself, as it ends; what finds no peers has done nothing
            return self._finds_nobody(replica) and self.ledger.may_have_ended(replica)
        last = self.departed.get(replica)
        awaited = self.ledger.is_replaced(replica) and not self._is_recorded(replica)
        return self.ledger.was_unseen(replica) if awaited else last is None or not has_ended(last)

    def runs(self, replica: Replica) -> bool:
        """Whether a replica runs or has completed."""
        return self.has_completed(replica) or (replica in self.present and is_up(self.present[replica]))

    def is_ready(self, replica: Replica) -> bool:
        """Whether a replica is ready or has completed."""
        return self.has_completed(replica) or (replica in self.present and self.present[replica].ready)

    def completed(self, role: Role) -> frozenset[int]:
        """Return the replicas of a role that have completed, by index, as far as they are wanted still."""
        wanted = self.job.replicas(role)
        return frozenset(index for index in self.ledger.roles[role].completed if index < wanted)

    def tolerations(self, role: Role) -> tuple[Mapping[str, Any], ...]:
        """Return the tolerations that the pods of a role ask for: the template's and the pool's."""
        pool = self.job.spec.node_pool
        own = self.job.template(role).spec.tolerations or ()
        return (*own, *(pool.tolerations if pool else ()))

    def ready_or_completed(self, role: Role) -> int:
        """Return how many replicas of a role are ready or have completed."""
        return sum(self.is_ready(each) for each in self.replicas if each.role is role)
