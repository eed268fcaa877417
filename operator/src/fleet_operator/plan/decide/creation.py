"""Decides which objects to create now: the Service, additional objects and pods.

Additional objects (claims, policies, budgets, PodGroups) are created before the pods, and deleted when they
are no longer needed. If the job or the operator's settings now require a different object, it is deleted and
created again. Changes by others are kept, because a webhook of the cluster would only repeat them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fleet_operator.api import Gang, Role, StartupOrder
from fleet_operator.build import Peers, PodBuilder, Start, build_service
from fleet_operator.plan.decide.failure_policy import LONGEST
from fleet_operator.plan.decide.quota import is_pausing
from fleet_operator.plan.formats import is_ahead
from fleet_operator.plan.model import CreatePod, CreateService, DeleteObject, EnsureObject, ObjectRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fleet_operator.build import Extra
    from fleet_operator.plan.model import Action, Observed
    from fleet_operator.plan.observe.attempts import Replica
    from fleet_operator.plan.observe.context import Context

__all__ = ["Creation", "create_actions", "creation_of", "ensure", "may_start_trainers", "remove"]

_KEPT = "PersistentVolumeClaim"


@dataclass(frozen=True, slots=True)
class Creation:
    """The replicas whose pods may be created now, and the reasons why others must wait."""

    due: tuple[Replica, ...]
    backed_off: tuple[Replica, ...]
    gated: bool  # whether trainers must wait for the parameter servers


def creation_of(context: Context) -> Creation:
    """Return the replicas to create now, those backed off, and whether trainers wait for servers."""
    job = context.job
    if is_pausing(context) or context.ledger.deactivated is not None:
        return Creation((), context.replicas.missing, gated=False)
    open_gate = may_start_trainers(
        job.spec.startup_policy.order,
        gang=job.gang is not Gang.NONE,
        servers=job.replicas(Role.PSERVER),
        up=context.ready_or_completed(Role.PSERVER),
    )
    taken = {pod.name for pod in context.observed.pods}  # regardless of its owner
    due, backed_off, gated = [], [], False
    for replica in context.replicas.missing:
        not_before = context.ledger.not_before_of(replica)
        if context.replicas.name_of(replica) in taken:
            continue
        if not_before is not None and is_ahead(context.now, not_before, at_most=LONGEST):
            backed_off.append(replica)
        elif replica.role is Role.TRAINER and not open_gate:
            gated = True
        else:
            due.append(replica)
    return Creation(tuple(due) if context.may_create else (), tuple(backed_off), gated)


def create_actions(context: Context, due: Sequence[Replica]) -> tuple[Action, ...]:
    """Return the actions that create the Service, the additional objects and the pods, in that order."""
    needs_service = context.may_create and not context.observed.service
    service = (CreateService(build_service(context.job)),) if needs_service else ()
    extras = ensure(context.extras, context.observed) if context.may_create else ()
    return (*service, *extras, *(_pods(context, due) if due else ()))


def _pods(context: Context, due: Sequence[Replica]) -> list[CreatePod]:
    """Return the actions that create pods for replicas that need not wait."""
    ledger, replicas = context.ledger, context.replicas
    key, is_new = context.key
    peers = Peers(context.job, context.hosts, context.assigned_ports)
    not_started = [each for each in replicas.wanted if not replicas.has_started(each)]
    creations = [
        CreatePod(
            PodBuilder(
                each.role,
                each.index,
                ledger.attempt(each),
                Start(
                    life=ledger.training,
                    unseen=ledger.may_have_ended(each),
                    # A restarted replica need not wait at its start if all others have started.
                    peers_run=ledger.is_replaced(each) and all(other == each for other in not_started),
                    key=key,
                    ports=peers.assigned_ports,
                ),
                peers,
            )
        )
        for each in due
    ]
    if is_new:
        creations[0] = replace(creations[0], brings_key=True)
    return creations


def may_start_trainers(order: StartupOrder, *, gang: bool, servers: int, up: int) -> bool:
    """Return whether trainers may be created when `up` servers are ready or have completed.

    A gang schedules all pods or none, so all of its pods must exist. A job without parameter servers never
    waits. Only new trainers wait: running ones are not affected when a server is not ready.
    """
    return gang or order is StartupOrder.ANY_ORDER or up >= servers


def ensure(extras: Iterable[Extra], observed: Observed) -> tuple[EnsureObject | DeleteObject, ...]:
    """Return the actions that create missing additional objects and replace outdated ones."""
    actions: list[EnsureObject | DeleteObject] = []
    for extra in extras:
        ref = ObjectRef.of(extra.manifest)
        there = observed.objects.get(ref)
        said = there.made_from if there is not None else None
        outdated = said not in (None, extra.made_from) and ref.kind != _KEPT
        if outdated:
            actions.append(DeleteObject(ref))
        if outdated or there is None:
            actions.append(EnsureObject(extra.manifest))
    return tuple(actions)


def remove(wanted: Iterable[Extra], observed: Observed) -> tuple[DeleteObject, ...]:
    """Return the actions that delete unneeded objects, except claims, because claims contain data."""
    kept = {ObjectRef.of(extra.manifest) for extra in wanted}
    return tuple(DeleteObject(ref) for ref in sorted(observed.objects.keys() - kept) if ref.kind != _KEPT)
