"""The context of a decision: a job's spec, objects and history at one moment.

*Completions.* A pod may be gone before its end is observed, because the operator was down, or because the pod
was deleted right after its end. In that case, the messages of pods that succeeded count. A parameter server
succeeds only when every trainer has completed, and lists them. A trainer lists those that it knows to have
completed. The messages only count for replicas with an unobserved end, and never override an observation: a
trainer that was observed to fail after it had completed has failed.

*The key* of one life of a job is a secret that only its replicas share, by which they authenticate each
other. It is stored only in the pods, where a restarted operator finds it. The API server accepts each pod
name only once, so the creation of the first pod of a life determines the key (docs/adr/0042).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from fleet_operator.api import Gang, Role
from fleet_operator.api.names import JOB_KEY, JOB_KEY_FILE, KUEUE, service_name
from fleet_operator.build import build_extras, port_blocks
from fleet_operator.plan.formats import stamp
from fleet_operator.plan.model import ObjectRef
from fleet_operator.plan.observe.attempts import RANK_ZERO, Ledger, Replica
from fleet_operator.plan.observe.pods import has_ended, has_started, has_succeeded, is_on_silent_node, lost_at
from fleet_operator.plan.observe.replicas import Replicas
from fleet_operator.plan.observe.termination_message import parse_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime

    from fleet_operator.api import FleetJob
    from fleet_operator.build import Extra, Hosts
    from fleet_operator.plan.model import Observed, ObservedPod

__all__ = [
    "Context",
    "brings_own_key",
    "cannot_make",
    "context_of",
    "is_resized",
    "is_unseen",
    "key_of_life",
    "trainers_to_have",
    "unserved",
    "with_completions",
]


@dataclass(frozen=True)
class Context:
    """A job's spec, observed objects and history, as input to all decisions."""

    job: FleetJob
    observed: Observed
    now: datetime
    hosts: Hosts
    ledger: Ledger
    asked: int  # the number of trainers in the manifest; the job has fewer if some start too late

    def with_ledger(self, ledger: Ledger) -> Self:
        """Return the same context with another ledger, which determines the current pods."""
        return self if ledger is self.ledger else replace(self, ledger=ledger)

    @cached_property
    def replicas(self) -> Replicas:
        """The replicas and their current pods, as determined by the ledger."""
        return Replicas(self.job, self.ledger, self.observed)

    @cached_property
    def all_up(self) -> bool:
        """True if every replica is running or has completed."""
        return all(self.replicas.runs(each) for each in self.replicas.wanted)

    @cached_property
    def enough_up(self) -> bool:
        """True if an elastic job can train now: all servers and enough trainers are running."""
        up = [each for each in self.replicas.wanted if self.replicas.runs(each)]
        trainers = sum(each.role is Role.TRAINER for each in up)
        all_servers = len(up) - trainers == self.job.replicas(Role.PSERVER)
        return self.job.elastic and all_servers and trainers >= self.job.least_trainers

    def completed(self, role: Role) -> frozenset[int]:
        """Return the indexes of a role's needed replicas that have completed."""
        wanted = self.job.replicas(role)
        return frozenset(index for index in self.ledger.roles[role].completed if index < wanted)

    def ready_or_completed(self, role: Role) -> int:
        """Return the number of a role's replicas that are ready or have completed."""
        return sum(self.replicas.is_ready(each) for each in self.replicas.wanted if each.role is role)

    @cached_property
    def failed_in_incident(self) -> frozenset[Replica]:
        """The replicas that have failed in the current incident; empty without an incident."""
        return self.ledger.failed_in_incident(self.now) or frozenset()

    @cached_property
    def last_failed(self) -> Replica | None:
        """The replica of the last failure in the status, or None if it is no longer needed."""
        before = self.job.status.last_failure
        wanted = () if before is None else self.replicas.wanted
        return next((each for each in wanted if before and self.replicas.name_of(each) == before.pod), None)

    @cached_property
    def may_have_served(self) -> bool:
        """True if a server that exited with 0 may have completed: every trainer may have run.

        Every trainer must have run, in its current pod or an earlier one. In an elastic job, trainer 0
        suffices, because the others may have started too late.
        """
        first = self.replicas.present.get(RANK_ZERO)
        done = self.ledger.has_completed(RANK_ZERO) or (first is not None and has_succeeded(first))
        if self.job.elastic and done:
            return True
        return all(_may_have_run(self, each) for each in self.replicas.wanted if each.role is Role.TRAINER)

    @cached_property
    def servers_replaced_at(self) -> tuple[datetime | None, bool]:
        """The creation time of the newest restarted server's pod, and whether any such pod is missing."""
        restarted = (each for each in self.replicas.wanted if each.role is Role.PSERVER)
        pods = [self.replicas.present.get(each) for each in restarted if self.ledger.is_replaced(each)]
        born = (pod.created_at for pod in pods if pod is not None and pod.created_at is not None)
        return max(born, default=None), None in pods

    @cached_property
    def silent_nodes(self) -> dict[Replica, datetime | None]:
        """The replicas on silent nodes, each with the time at which it counts as lost, if any."""
        return {
            replica: lost_at(pod, self.tolerations(replica.role))
            for replica, pod in self.replicas.present.items()
            if is_on_silent_node(pod)
        }

    def tolerations(self, role: Role) -> tuple[Mapping[str, Any], ...]:
        """Return the tolerations of a role's pods, from both the template and the job."""
        scheduling = self.job.spec.scheduling
        own = self.job.template(role).spec.tolerations or ()
        return (*own, *(scheduling.tolerations if scheduling else ()))

    @cached_property
    def extras(self) -> tuple[Extra, ...]:
        """The additional objects that the job should have now."""
        seen = self.observed
        readers, everybody = seen.metrics_readers, seen.metrics_open
        built = build_extras(self.job, self.ledger.job_restarts, readers=readers, metrics_open=everybody)
        return tuple(each for each in built if not (each.by_default and cannot_make(each, seen)))

    @cached_property
    def unserved(self) -> Extra | None:
        """The first needed object that the operator has no permission to create, or None."""
        return unserved(self.extras, self.observed)

    @cached_property
    def foreign(self) -> tuple[str, ...]:
        """Objects of other owners that occupy a name of this job's objects, as ``Kind/name``."""
        pods = (f"Pod/{pod.name}" for pod in self.observed.pods if not pod.owned)
        wanted = {f"Pod/{self.replicas.name_of(each)}" for each in self.replicas.wanted}
        wanted |= {f"{each.manifest['kind']}/{each.manifest['metadata']['name']}" for each in self.extras}
        wanted.add(f"Service/{service_name(self.job.name)}")  # other foreign names do not matter
        return tuple(sorted(({*self.observed.foreign, *pods} & wanted) - {*self.observed.left_over}))

    @property
    def may_create(self) -> bool:
        """True if all names are free and the operator may create every object."""
        return not (self.foreign or self.observed.left_over or self.unserved)

    @cached_property
    def key(self) -> tuple[str | None, bool]:
        """The key that the operator sets for the job's current life, if any, and whether it is new."""
        if brings_own_key(self.job):
            return None, False
        own = (pod for pod in self.observed.pods if pod.owned)
        return key_of_life(own, self.ledger.job_restarts, self.observed.new_key)

    @property
    def assigned_ports(self) -> tuple[int, ...]:
        """The host-network ports in the environment of the job's oldest current pod."""
        life = self.ledger.job_restarts
        pods = [
            pod for pod in self.observed.pods if pod.owned and pod.attempt.job == life and pod.assigned_ports
        ]
        eldest = min(pods, key=lambda pod: (pod.created_at is None, pod.created_at), default=None)
        return eldest.assigned_ports if eldest is not None else ()


def context_of(job: FleetJob, observed: Observed, now: datetime, hosts: Hosts) -> Context:
    """Build the context, recording new observations in its ledger."""
    pods = (pod for pod in observed.pods if pod.owned)
    ledger = Ledger.of(job.status).with_attempts((Replica(pod.role, pod.index), pod.attempt) for pod in pods)
    queue = job.queue_name if job.spec.pod_group_policy is None else None  # a policy is immutable
    ledger = ledger if ledger.queue_name == queue else replace(ledger, queue_name=queue)
    if job.host_ports is not None:
        ledger = ledger.with_ports({role: port_blocks(job, role) for role in job.roles})
    context = with_completions(Context(job, observed, now, hosts, ledger, job.replicas(Role.TRAINER)))
    context = _with_time_in_queue(context)
    return _with_trainers_to_have(context) if job.elastic else context


def _with_time_in_queue(context: Context) -> Context:
    """Return the context with the time in Kueue's queue excluded from the job's running time.

    The job is in the queue as long as Kueue's gate is on each pod of its current life that has not ended.
    Kueue removes the gates of all pods when it admits their group. A deactivated job waits as well.
    """
    job, ledger = context.job, context.ledger
    pods = [pod for pod in context.replicas.present.values() if not has_ended(pod) and pod.deleted_at is None]
    gated = bool(pods) and all(any(gate.startswith(KUEUE) for gate in pod.gates) for pod in pods)
    queued = job.gang is Gang.KUEUE and (gated or ledger.deactivated is not None)
    if queued and ledger.queued_since is None:
        return context.with_ledger(replace(ledger, queued_since=stamp(context.now)))
    if queued or ledger.queued_since is None:
        return context
    waited = max(stamp(context.now) - ledger.queued_since, timedelta())
    if (start := job.status.start_time) is not None:
        status = job.status.model_copy(update={"start_time": start + waited})
        context = replace(context, job=job.with_status(status))
    return context.with_ledger(replace(ledger, queued_since=None, admitted=stamp(context.now)))


def _with_trainers_to_have(context: Context) -> Context:
    """Return the context of an elastic job with the number of trainers that it may have now."""
    job, ledger = context.job, context.ledger
    before, any_completed = job.status.role(Role.TRAINER).replicas, bool(ledger.roles[Role.TRAINER].completed)
    number = trainers_to_have(asked=context.asked, before=before, any_completed=any_completed)
    ledger = ledger.without_surplus(Role.TRAINER, number)
    return replace(context, job=job.with_trainers(number), ledger=ledger)


def with_completions(context: Context) -> Context:
    """Return the context with new pods and completions recorded in the ledger."""
    context = context.with_ledger(_with_own_ends(context, Role.TRAINER))
    if Role.PSERVER in context.job.roles:
        context = context.with_ledger(_with_own_ends(context, Role.PSERVER))
    ledger = context.ledger
    if unseen := [each for each in context.replicas.wanted if is_unseen(context, each)]:
        trainers = frozenset(each.index for each in unseen if each.role is Role.TRAINER)
        ledger = ledger.with_seen(Role.TRAINER, frozenset(), trainers & _named(context))
        servers = frozenset(each.index for each in unseen if each.role is Role.PSERVER)
        wanted = range(context.job.replicas(Role.TRAINER))
        if ledger.roles[Role.TRAINER].completed.issuperset(wanted):  # no trainer is left to serve
            ledger = ledger.with_seen(Role.PSERVER, frozenset(), servers)
    return context.with_ledger(ledger)


def _with_own_ends(context: Context, role: Role) -> Ledger:
    pods = [(each.index, pod) for each, pod in _seen(context) if each.role is role]
    created = frozenset(index for index, _ in pods)
    ended_well = ((index, pod) for index, pod in pods if has_succeeded(pod))
    completed = frozenset(
        index for index, pod in ended_well if role is Role.TRAINER or _has_served(context, pod)
    )
    return context.ledger.with_seen(role, created, completed)


def is_unseen(context: Context, replica: Replica) -> bool:
    """Return whether a replica may have completed in a pod whose end was not observed."""
    replicas, ledger = context.replicas, context.ledger
    if ledger.has_completed(replica):
        return False
    if replica in replicas.present:
        # A running pod will report the completion at its end, but one that finds no peers cannot know it.
        return ledger.may_have_ended(replica) and replica in replicas.finding_nobody
    if ledger.is_replaced(replica) and not replicas.has_vanished(replica):  # the next pod is pending
        return ledger.may_have_ended(replica)
    last = replicas.departed.get(replica)
    return last is None or not has_ended(last)


def _has_served(context: Context, server: ObservedPod) -> bool:
    """Return whether a server that exited with 0 has completed; otherwise its end is a failure."""
    wanted = range(context.job.replicas(Role.TRAINER))
    return context.may_have_served or parse_words(server.message).completed.issuperset(wanted)


def _may_have_run(context: Context, trainer: Replica) -> bool:
    """Return whether a trainer has run since the job's latest restart, or may have run unobserved."""
    replicas = context.replicas
    if replicas.has_started(trainer) or context.ledger.is_replaced(trainer):
        return True
    last = replicas.departed.get(trainer)
    return replicas.has_vanished(trainer) and (last is None or has_started(last))


def _named(context: Context) -> frozenset[int]:
    """Return the trainers that successful pods report as completed in their messages."""
    named: set[int] = set()
    for replica, pod in _seen(context):
        if not context.ledger.has_completed(replica) or not has_succeeded(pod):
            continue
        words = parse_words(pod.message)
        named |= words.completed
        if words.joined is None and replica.role is Role.PSERVER and not (pod.deleted_at or pod.disruption):
            named.update(_served(context))
    return frozenset(named)


def _served(context: Context) -> Iterator[int]:
    """Yield the trainers that must have completed because a server succeeded without a message.

    The server waited for all trainers that ran. In an elastic job it may have treated some as lost, so no
    completion is known.
    """
    if context.job.elastic:
        return
    for trainer in (each for each in context.replicas.wanted if each.role is Role.TRAINER):
        if _may_have_run(context, trainer):
            yield trainer.index


def _seen(context: Context) -> Iterator[tuple[Replica, ObservedPod]]:
    yield from context.replicas.departed.items()
    yield from context.replicas.present.items()


def brings_own_key(job: FleetJob) -> bool:
    """Return whether a pod template of the job sets the job's key itself, for example from a Secret."""
    variables = (each for role in job.roles for each in job.template(role).main_container.env or ())
    return any(variable.name in (JOB_KEY, JOB_KEY_FILE) for variable in variables)


def key_of_life(pods: Iterable[ObservedPod], life: int, new: str | None) -> tuple[str | None, bool]:
    """Return the job's key since its latest restart, and whether the key is new.

    Parameters
    ----------
    pods : iterable of ObservedPod
        The job's own pods.
    life : int
        How often the whole job was restarted.
    new : str or None
        The new key for a life that has none, if available.
    """
    known = next((pod.key for pod in pods if pod.attempt.job == life and pod.key is not None), None)
    return (new, new is not None) if known is None else (known, False)


def is_resized(*, before: int, wanted: int) -> bool:
    """Return whether the desired number of trainers differs from `before`, which is 0 for a new job."""
    return before not in (0, wanted)


def trainers_to_have(*, asked: int, before: int, any_completed: bool) -> int:
    """Return the number of trainers of an elastic job, from the desired and the previous number.

    Once one trainer has completed, the others are about to complete. A new trainer would find no servers, and
    would have nothing to do.
    """
    return min(asked, before) if any_completed and before else asked


def unserved(extras: Iterable[Extra], observed: Observed) -> Extra | None:
    """Return the first object that the operator has no permission to create, or None."""
    return next((extra for extra in extras if _is_unserved(extra, observed)), None)


def cannot_make(extra: Extra, observed: Observed) -> bool:
    """Return whether an object cannot be created because permission is missing or its name is taken."""
    ref = ObjectRef.of(extra.manifest)
    return _is_unserved(extra, observed) or f"{ref.kind}/{ref.name}" in observed.foreign


def _is_unserved(extra: Extra, observed: Observed) -> bool:
    return (extra.manifest["apiVersion"], extra.manifest["kind"]) in observed.unserved
