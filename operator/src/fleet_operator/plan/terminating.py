"""Pods that are being deleted: their names are taken until they are gone, and some never go by themselves.

Only a pod that cannot run any more is removed without its node's word: one of a lost node, or one whose
containers have all ended. Two pods of one replica could have the same claim mounted, and on a node that is
merely slow they would. What a lost node still runs is kept out of the training and of the checkpoints by its
attempt.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from fleet_operator.plan.model import PodPhase
from fleet_operator.plan.node_loss import is_on_lost_node

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet_operator.plan.model import ObservedPod

__all__ = ["PATIENCE", "given_up_at", "how_to_force", "may_be_forced", "stuck_pods"]

PATIENCE = timedelta(seconds=30)
NODE_PATIENCE = timedelta(minutes=1)
"""How long after a node counts as lost its kubelet may still confirm the end of a pod."""


def given_up_at(grace_ends: datetime, node_lost: datetime | None = None) -> datetime:
    """Return when a pod whose grace period ends then is not waited for any more, if it cannot run.

    A kubelet kills at the end of the grace period; one that has not said so half a minute later is gone, cut
    off or slow. A lost node keeps no grace period.

    Parameters
    ----------
    grace_ends : datetime
        The pod's deletionTimestamp.
    node_lost : datetime, optional
        When its node counts as lost, if it does or will.
    """
    by_grace = grace_ends + PATIENCE
    return by_grace if node_lost is None else min(by_grace, node_lost + NODE_PATIENCE)


def may_be_forced(pod: ObservedPod) -> bool:
    """Whether a pod beyond all patience may be deleted without its node's word."""
    return is_on_lost_node(pod) or pod.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)


def stuck_pods(pods: Iterable[ObservedPod], now: datetime) -> list[str]:
    """Return the names of pods that are waited for too long, and only a person may force.

    What a finalizer keeps goes when the finalizer does.
    """
    return sorted(
        pod.name
        for pod in pods
        if pod.deleted_at is not None
        and now >= given_up_at(pod.deleted_at)
        and not (pod.finalizers or may_be_forced(pod))
    )


def how_to_force(pods: Iterable[ObservedPod], namespace: str, now: datetime) -> str | None:
    """Return what a person can do about stuck pods, or None if there are none."""
    stuck = stuck_pods(pods, now)
    if not stuck:
        return None
    command = f"kubectl delete pod {' '.join(stuck)} -n {namespace} --grace-period=0 --force"
    if len(stuck) > 1:
        found, certain = "their nodes have not said that they have ended", "they do not run any more"
    else:
        found, certain = "its node has not said that it has ended", "it does not run any more"
    return f"{found}; if it is certain that {certain}: {command}"
