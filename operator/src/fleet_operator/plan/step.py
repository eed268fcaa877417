"""One step of a job that has not finished: older attempts go, missing replicas come, the status tells."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from fleet_operator.api import ConditionType, Gang, JobState, Role
from fleet_operator.build import Start, build_pod, build_service
from fleet_operator.plan.backoff import LONGEST
from fleet_operator.plan.deadline import deadline
from fleet_operator.plan.extras import ensure, remove
from fleet_operator.plan.ledger import Replica
from fleet_operator.plan.model import CreatePod, CreateService, DeletePod
from fleet_operator.plan.node_loss import node_lost_at
from fleet_operator.plan.pending import pending_deadline, pending_since
from fleet_operator.plan.quota import AGAIN, gives_back_at, is_pausing, with_quota
from fleet_operator.plan.scaling import too_late_sentence
from fleet_operator.plan.startup import may_start_trainers
from fleet_operator.plan.status import build_status
from fleet_operator.plan.telling import tell
from fleet_operator.plan.terminating import given_up_at, may_be_forced
from fleet_operator.plan.times import is_ahead, stamp
from fleet_operator.plan.waiting import trouble, why_in_doubt, why_not_created, why_not_running, why_unended

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from fleet_operator.api import LastFailure
    from fleet_operator.plan.model import Action, Event, ObservedPod, Plan
    from fleet_operator.plan.situation import Situation
    from fleet_operator.plan.status import Told

__all__ = ["ALL_CREATED", "deletions", "hold", "step", "why_pending"]

ALL_CREATED = (True, "PodsCreated", "the pods of all replicas are there")


@dataclass(frozen=True, slots=True)
class Creation:
    """Which replicas may be created now, and why others may not."""

    due: tuple[Replica, ...]
    backed_off: tuple[Replica, ...]
    gated: bool  # trainers wait for the parameter servers


def step(
    situation: Situation,
    told: Mapping[ConditionType, Told] | None = None,
    *,
    last_failure: LastFailure | None = None,
    events: tuple[Event, ...] = (),
) -> Plan:
    """Bring the pods one step closer to the ledger.

    Parameters
    ----------
    situation : Situation
        The moment, with the ledger as it is to be remembered.
    told : mapping, optional
        Conditions that the decision before has changed.
    last_failure : LastFailure, optional
        What the decision before has answered.
    events : tuple of Event
        What it wants to be told.
    """
    situation = with_quota(situation)
    before, policy = situation.job.status, situation.job.spec.run_policy
    told = {**_conditions_of_suspension(situation), **(told or {})}
    restarting = ConditionType.RESTARTING in told or before.is_true(ConditionType.RESTARTING)
    creation = _creation(situation)
    over = situation.all_up or (situation.enough_up and not _is_pausing(situation, creation))
    told |= _progress(situation, creation, restarted=restarting and over)
    waiting_state = JobState.RESTARTING if restarting else JobState.PENDING
    runs = over or (situation.enough_up and not restarting)
    state = JobState.RUNNING if runs else waiting_state
    start = before.start_time or stamp(situation.now)
    status = build_status(situation, state, told, last_failure=last_failure, start=start)
    leaving, looks = deletions(situation, situation.replicas.past)
    looks += [situation.ledger.not_before_of(replica) for replica in creation.backed_off]
    looks += situation.silent_nodes.values()
    if (gives_back := gives_back_at(situation)) is not None:
        looks += [gives_back, situation.now + AGAIN]
    if is_pausing(situation) and situation.ledger.quota is not None:
        looks.append(situation.ledger.quota.not_before)
    looks.append(deadline(start, policy.active_deadline_seconds))
    looks.append(pending_deadline(pending_since(status), policy.pending_deadline_seconds))
    surplus = remove(situation.extras, situation.observed)
    actions = (*leaving, *surplus, *_creations(situation, creation.due))
    return tell(situation, status, actions, events, looks)


def why_pending(situation: Situation) -> tuple[str, str, str | None]:
    """Return why not all replicas run, in a word and a sentence, and the pod that says so, if one does."""
    creation = _creation(situation)
    not_created = why_not_created(situation, backed_off=creation.backed_off, gated=creation.gated)
    waiting = why_not_running(situation, not_created)
    pod = None if waiting is not_created else trouble(situation)
    return *waiting, pod.name if pod else None


def hold(situation: Situation) -> Plan:
    """Let no pod of the job run while it is suspended."""
    sentence = "runPolicy.suspend is true"
    pods = (*situation.replicas.past, *situation.replicas.present.values())
    stays = why_unended(situation, pods)
    held = stays.sentence if stays is not None else "no pod of this job runs until it is false"
    told: dict[ConditionType, Told] = {
        ConditionType.PODS_CREATED: (False, "Suspended", sentence),
        ConditionType.RUNNING: (False, "Suspended", sentence),
        ConditionType.SUSPENDED: (True, "Suspended", f"{sentence}: {held}"),
    }
    if situation.job.status.is_true(ConditionType.RESTARTING):
        told[ConditionType.RESTARTING] = (False, "Suspended", sentence)
    leaving, looks = deletions(situation, pods)
    surplus = remove((each for each in situation.extras if each.while_held), situation.observed)
    status = build_status(situation, JobState.SUSPENDED, told)
    return tell(situation, status, (*leaving, *surplus), (), looks)


def deletions(
    situation: Situation, pods: Iterable[ObservedPod]
) -> tuple[tuple[Action, ...], list[datetime | None]]:
    """Return what removes some pods, and when to look at those again that are on their way out.

    A pod that stays beyond all patience and cannot run any more is deleted at once, wanted or not: its name
    is needed. So is one of a deleted job of this name, which has nobody else to care for it.
    """
    actions: list[Action] = [_deletion(situation, pod) for pod in pods if pod.deleted_at is None]
    looks: list[datetime | None] = []
    for pod in situation.observed.pods:
        cared_for = pod.owned or f"Pod/{pod.name}" in situation.observed.left_over
        if not cared_for or pod.deleted_at is None:
            continue
        given_up = given_up_at(pod.deleted_at, node_lost_at(pod, situation.tolerations(pod.role)))
        if situation.now < given_up:
            looks.append(given_up)
        elif may_be_forced(pod):
            actions.append(DeletePod(pod.name, pod.uid, grace_period_seconds=0, version=pod.version))
    return tuple(actions), looks


def _deletion(situation: Situation, pod: ObservedPod) -> DeletePod:
    """Delete a pod: one of an older attempt whatever it does, any other only while it is as it was seen.

    It may have ended meanwhile, which is to be known before it is gone.
    """
    of_the_past = pod.attempt < situation.ledger.attempt(Replica(pod.role, pod.index))
    return DeletePod(pod.name, pod.uid, version=None if of_the_past else pod.version)


def _creation(situation: Situation) -> Creation:
    job = situation.job
    if is_pausing(situation):
        return Creation((), situation.replicas.missing, gated=False)
    open_gate = may_start_trainers(
        job.spec.startup_policy,
        gang=job.gang is not Gang.NONE,
        servers=job.replicas(Role.PSERVER),
        up=situation.ready_or_completed(Role.PSERVER),
    )
    taken = {pod.name for pod in situation.observed.pods}  # whoever owns them
    due, backed_off, gated = [], [], False
    for replica in situation.replicas.missing:
        not_before = situation.ledger.not_before_of(replica)
        if situation.replicas.name_of(replica) in taken:
            continue
        if not_before is not None and is_ahead(situation.now, not_before, at_most=LONGEST):
            backed_off.append(replica)
        elif replica.role is Role.TRAINER and not open_gate:
            gated = True
        else:
            due.append(replica)
    return Creation(tuple(due) if situation.may_create else (), tuple(backed_off), gated)


def _creations(situation: Situation, due: Iterable[Replica]) -> tuple[Action, ...]:
    """Return what creates the Service, whose names the pods' environments hold, and then the pods."""
    job, ledger = situation.job, situation.ledger
    needs_service = situation.may_create and not situation.observed.service
    service = (CreateService(build_service(job)),) if needs_service else ()
    extras = ensure(situation.extras, situation.observed) if situation.may_create else ()
    key, is_new = situation.key
    ports = situation.told_ports
    hosts = cache(situation.hosts)  # every pod's environment lists every host
    pods = (
        build_pod(
            job,
            each.role,
            each.index,
            ledger.attempt(each),
            hosts,
            Start(
                life=ledger.training,
                unseen=ledger.may_have_ended(each),
                peers_run=ledger.is_replaced(each) and _peers_run(situation, each),
                key=key,
                ports=ports,
            ),
        )
        for each in due
    )
    creations = [CreatePod(pod) for pod in pods]
    if is_new and creations:
        creations[0] = replace(creations[0], brings_key=True)
    return (*service, *extras, *creations)


def _peers_run(situation: Situation, replica: Replica) -> bool:
    """Whether all replicas but this one have got as far as to run, so that it waits for no start."""
    replicas = situation.replicas
    return all(replicas.has_started(each) for each in replicas.wanted if each != replica)


def _is_pausing(situation: Situation, creation: Creation) -> bool:
    """Whether a replica is between two lives: its pod is still to go, or the next may not come yet."""
    replicas = situation.replicas
    leaving = {pod.name for pod in replicas.past}
    return bool(creation.backed_off) or any(replicas.name_of(each) in leaving for each in replicas.missing)


def _progress(situation: Situation, creation: Creation, *, restarted: bool) -> dict[ConditionType, Told]:
    """Tell whether all pods are there and run, and if not, why; and that a restart is over, if it is."""
    waiting = why_not_created(situation, backed_off=creation.backed_off, gated=creation.gated)
    told: dict[ConditionType, Told] = {}
    if waiting is None:
        told[ConditionType.PODS_CREATED] = ALL_CREATED
    else:
        told[ConditionType.PODS_CREATED] = (False, waiting.reason, waiting.sentence)
    if not (situation.all_up or situation.enough_up):
        told[ConditionType.RUNNING] = (False, *why_not_running(situation, waiting))
        return told
    if situation.all_up:
        sentence = f"all {len(situation.replicas.wanted)} replicas run or have completed"
        sentence += too_late_sentence(asked=situation.asked, had=situation.job.replicas(Role.TRAINER))
    else:
        why = why_not_running(situation, waiting).sentence
        sentence = f"the servers and at least trainer.minReplicas trainers run; not all replicas do: {why}"
    told[ConditionType.RUNNING] = (True, *(why_in_doubt(situation) or ("ReplicasRunning", sentence)))
    if restarted:
        told[ConditionType.RESTARTING] = (False, "Restarted", sentence)
    return told


def _conditions_of_suspension(situation: Situation) -> dict[ConditionType, Told]:
    if situation.job.status.condition(ConditionType.SUSPENDED) is None:
        return {}
    return {ConditionType.SUSPENDED: (False, "Resumed", "runPolicy.suspend is false")}
