"""One job at one moment, put in order for the policies: what is wanted, what is there, what has happened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from fleet_operator.api import Role
from fleet_operator.api.names import service_name
from fleet_operator.build import build_extras
from fleet_operator.plan.extras import cannot_make, unserved
from fleet_operator.plan.key import brings_own_key, key_of_life
from fleet_operator.plan.node_loss import is_on_silent_node, lost_at
from fleet_operator.plan.replicas import Replicas

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from fleet_operator.api import FleetJob
    from fleet_operator.build import Extra, Hosts
    from fleet_operator.plan.ledger import Ledger, Replica
    from fleet_operator.plan.model import Observed

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

    @cached_property
    def replicas(self) -> Replicas:
        """The replicas, and the pods that are theirs by the ledger."""
        return Replicas(self.job, self.ledger, self.observed)

    @cached_property
    def all_up(self) -> bool:
        """Whether every replica runs or has completed."""
        return all(self.replicas.runs(each) for each in self.replicas.wanted)

    @cached_property
    def enough_up(self) -> bool:
        """Whether an elastic job trains without those that do not run: all servers and enough trainers do."""
        up = [each for each in self.replicas.wanted if self.replicas.runs(each)]
        trainers = sum(each.role is Role.TRAINER for each in up)
        all_servers = len(up) - trainers == self.job.replicas(Role.PSERVER)
        return self.job.elastic and all_servers and trainers >= self.job.least_trainers

    def completed(self, role: Role) -> frozenset[int]:
        """Return the replicas of a role that have completed, by index, as far as they are wanted still."""
        wanted = self.job.replicas(role)
        return frozenset(index for index in self.ledger.roles[role].completed if index < wanted)

    def ready_or_completed(self, role: Role) -> int:
        """Return how many replicas of a role are ready or have completed."""
        return sum(self.replicas.is_ready(each) for each in self.replicas.wanted if each.role is role)

    @cached_property
    def silent_nodes(self) -> dict[Replica, datetime | None]:
        """Replicas whose node has gone silent, and when each is given up, if it is."""
        return {
            replica: lost_at(pod, self.tolerations(replica.role))
            for replica, pod in self.replicas.present.items()
            if is_on_silent_node(pod)
        }

    def tolerations(self, role: Role) -> tuple[Mapping[str, Any], ...]:
        """Return the tolerations that the pods of a role ask for: the template's and the pool's."""
        pool = self.job.spec.node_pool
        own = self.job.template(role).spec.tolerations or ()
        return (*own, *(pool.tolerations if pool else ()))

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
    def foreign(self) -> tuple[str, ...]:
        """Objects that have names of this job's but belong to somebody else, as ``Kind/name``."""
        pods = (f"Pod/{pod.name}" for pod in self.observed.pods if not pod.owned)
        wanted = {f"Pod/{self.replicas.name_of(each)}" for each in self.replicas.wanted}
        wanted |= {f"{each.manifest['kind']}/{each.manifest['metadata']['name']}" for each in self.extras}
        wanted.add(f"Service/{service_name(self.job.name)}")  # what only has our labels takes no name
        return tuple(sorted(({*self.observed.foreign, *pods} & wanted) - {*self.observed.left_over}))

    @property
    def may_create(self) -> bool:
        """Whether nothing forbids to create what is missing: no name is another's, and all can be made."""
        return not (self.foreign or self.observed.left_over or self.unserved)

    @cached_property
    def key(self) -> tuple[str | None, bool]:
        """The key of the present life, if the operator has one for it, and whether no pod has it yet."""
        if brings_own_key(self.job):
            return None, False
        own = (pod for pod in self.observed.pods if pod.owned)
        return key_of_life(own, self.ledger.job_restarts, self.observed.new_key)

    @property
    def told_ports(self) -> tuple[int, ...]:
        """Where pods on their nodes' network listen, as the eldest pod of the present life was told it."""
        life = self.ledger.job_restarts
        told = [pod for pod in self.observed.pods if pod.owned and pod.attempt.job == life and pod.told_ports]
        eldest = min(told, key=lambda pod: (pod.created_at is None, pod.created_at), default=None)
        return eldest.told_ports if eldest is not None else ()
