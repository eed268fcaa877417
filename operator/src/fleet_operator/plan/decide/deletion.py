"""Decides which pods to delete, and which terminating pods to force-delete.

The name of a pod is taken until the pod is gone, and some pods never end by themselves. Only a pod that
cannot run any more is removed without its node's confirmation: one on a lost node, or one whose containers
have all ended. Otherwise, on a slow node, two pods of a replica would mount the same claim. A pod that still
runs on a lost node cannot affect the training or the checkpoints, because its attempt is outdated.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from fleet_operator.plan.model import DeletePod, PodPhase
from fleet_operator.plan.observe.attempts import Replica
from fleet_operator.plan.observe.pods import is_on_lost_node, node_lost_at

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet_operator.plan.model import Action, ObservedPod
    from fleet_operator.plan.observe.context import Context

__all__ = ["PATIENCE", "deletions", "given_up_at", "how_to_force", "may_be_forced", "stuck_pods"]

PATIENCE = timedelta(seconds=30)
NODE_PATIENCE = timedelta(minutes=1)
"""How long the kubelet has to confirm a pod's end after the node counts as lost."""


def deletions(
    context: Context, pods: Iterable[ObservedPod]
) -> tuple[tuple[Action, ...], list[datetime | None]]:
    """Return the actions that delete pods, and the time at which to recheck terminating pods.

    An overdue pod that cannot run any more is deleted immediately, needed or not, because its name is
    required. The same holds for a pod of a deleted job of this name, which no other controller handles.
    """
    actions: list[Action] = [_deletion(context, pod) for pod in pods if pod.deleted_at is None]
    looks: list[datetime | None] = []
    for pod in context.observed.pods:
        cared_for = pod.owned or f"Pod/{pod.name}" in context.observed.left_over
        if not cared_for or pod.deleted_at is None:
            continue
        given_up = given_up_at(pod.deleted_at, node_lost_at(pod, context.tolerations(pod.role)))
        if context.now < given_up:
            looks.append(given_up)
        elif may_be_forced(pod):
            actions.append(DeletePod(pod.name, pod.uid, grace_period_seconds=0, version=pod.version))
    return tuple(actions), looks


def _deletion(context: Context, pod: ObservedPod) -> DeletePod:
    """Return the action that deletes a pod: always if its attempt is outdated, else only if it is unchanged.

    A changed pod may have ended meanwhile, and its end must be observed first.
    """
    of_the_past = pod.attempt < context.ledger.attempt(Replica(pod.role, pod.index))
    return DeletePod(pod.name, pod.uid, version=None if of_the_past else pod.version)


def given_up_at(grace_ends: datetime, node_lost: datetime | None = None) -> datetime:
    """Return the time from which a terminating pod that can no longer run is overdue.

    A kubelet kills the pod at the end of the grace period. If it has not confirmed that half a minute later,
    it is gone, disconnected or slow. A lost node does not observe the grace period.

    Parameters
    ----------
    grace_ends : datetime
        The pod's deletionTimestamp.
    node_lost : datetime, optional
        When the pod's node counts as lost, if it does.
    """
    by_grace = grace_ends + PATIENCE
    return by_grace if node_lost is None else min(by_grace, node_lost + NODE_PATIENCE)


def may_be_forced(pod: ObservedPod) -> bool:
    """Return whether an overdue pod may be deleted without confirmation from its node."""
    return is_on_lost_node(pod) or pod.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)


def stuck_pods(pods: Iterable[ObservedPod], now: datetime) -> list[str]:
    """Return the names of overdue pods that only a person may force-delete.

    Pods with finalizers are left out, because even a forced deletion waits until the finalizers are removed.
    """
    return sorted(
        pod.name
        for pod in pods
        if pod.deleted_at is not None
        and now >= given_up_at(pod.deleted_at)
        and not (pod.finalizers or may_be_forced(pod))
    )


def how_to_force(pods: Iterable[ObservedPod], namespace: str, now: datetime) -> str | None:
    """Return advice on deleting stuck pods, or None if no pod is stuck."""
    stuck = stuck_pods(pods, now)
    if not stuck:
        return None
    command = f"kubectl delete pod {' '.join(stuck)} -n {namespace} --grace-period=0 --force"
    if len(stuck) > 1:
        found, certain = "their nodes have not confirmed their end", "they are not running any more"
    else:
        found, certain = "its node has not confirmed its end", "it is not running any more"
    return f"{found}; if it is certain that {certain}: {command}"
