"""The state of an observed pod, judged by its main container and its node, ignoring sidecars.

A pod on a silent node is replaced, even if the node controller does not evict it. The operator never reads
nodes. When a node stops responding, the node controller sets the Ready condition of its pods to False, and
later evicts those that do not tolerate the taint. A toleration without a key, which is common for GPU nodes,
tolerates the taint forever, so that its pod is never evicted.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from fleet_operator.plan.model import PodPhase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fleet_operator.plan.model import ObservedPod

__all__ = [
    "EXIT_PEER_LOST",
    "UNREACHABLE_PATIENCE",
    "has_ended",
    "has_failed",
    "has_started",
    "has_succeeded",
    "is_active",
    "is_on_lost_node",
    "is_on_silent_node",
    "is_up",
    "lost_at",
    "node_lost_at",
    "patience",
    "silent_since",
]

EXIT_PEER_LOST = 91
_ENDED = (PodPhase.SUCCEEDED, PodPhase.FAILED)

UNREACHABLE_PATIENCE = timedelta(minutes=5)
"""How long a pod without its own toleration stays on a silent node, by default in Kubernetes."""

_TAINTS = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
_REASONS = frozenset({"NodeLost", "NodeNotReady", "NodeStatusUnknown", "NodeUnreachable"})
_NODE_IS_GONE = "DeletionByPodGC"
_NODE_IS_TAINTED = "DeletionByTaintManager"


def has_succeeded(pod: ObservedPod) -> bool:
    """Return whether the main container succeeded, whatever the state of sidecars."""
    return pod.exit_code == 0 if pod.exit_code is not None else pod.phase is PodPhase.SUCCEEDED


def has_failed(pod: ObservedPod) -> bool:
    """Return whether the main container failed, or the pod failed without running it."""
    return pod.exit_code != 0 if pod.exit_code is not None else pod.phase is PodPhase.FAILED


def has_ended(pod: ObservedPod) -> bool:
    """Return whether the main container has ended or will never run."""
    return pod.exit_code is not None or pod.phase in _ENDED


def has_started(pod: ObservedPod) -> bool:
    """Return whether the main container is running or has already run."""
    return pod.phase is not PodPhase.PENDING or pod.exit_code is not None


def is_up(pod: ObservedPod) -> bool:
    """Return whether the main container is believed to be running, even if its node is silent."""
    return pod.phase in (PodPhase.RUNNING, PodPhase.UNKNOWN) and pod.exit_code is None


def is_active(pod: ObservedPod) -> bool:
    """Return whether the pod uses, or will use, a node's resources."""
    return pod.phase not in _ENDED


def is_on_silent_node(pod: ObservedPod) -> bool:
    """Return whether the pod was running when its node became silent."""
    return is_up(pod) and pod.not_ready_reason in _REASONS


def is_on_lost_node(pod: ObservedPod) -> bool:
    """Return whether the pod's node is silent, so that the pod's end will not be reported.

    A person may have set the taint on a healthy node, so it counts only if the kubelet reports neither that
    the pod is ready nor that its container has ended.
    """
    tainted = pod.disruption == _NODE_IS_TAINTED and not pod.ready and pod.exit_code is None
    return pod.not_ready_reason in _REASONS or pod.disruption == _NODE_IS_GONE or tainted


def silent_since(pod: ObservedPod) -> str:
    """Return a phrase that says since when a pod's node has been silent, if known."""
    since = pod.not_ready_since
    return "silent" if since is None else f"silent since {since:%H:%M:%S} UTC"


def patience(tolerations: Iterable[Mapping[str, Any]]) -> timedelta | None:
    """Return how long a pod with these tolerations stays on a silent node, or None for no limit.

    Only tolerations that name a taint of a silent node count. The shortest one wins, as for the node
    controller.
    """
    named = [each.get("tolerationSeconds") for each in tolerations if each.get("key") in _TAINTS]
    if not named:
        return UNREACHABLE_PATIENCE
    limits = [seconds for seconds in named if seconds is not None]
    return timedelta(seconds=max(0, min(limits))) if limits else None


def lost_at(pod: ObservedPod, tolerations: Iterable[Mapping[str, Any]]) -> datetime | None:
    """Return when a pod on a silent node counts as lost; None if never, or if it is being deleted."""
    if not is_on_silent_node(pod) or pod.deleted_at is not None:
        return None
    return node_lost_at(pod, tolerations)


def node_lost_at(pod: ObservedPod, tolerations: Iterable[Mapping[str, Any]]) -> datetime | None:
    """Return when a pod's node counts as lost; None if it responds, or if the pod tolerates its loss forever.

    The pod need not have run. A taint alone is not enough: a person may have set it on a healthy node.
    """
    if pod.not_ready_reason not in _REASONS or pod.not_ready_since is None:
        return None
    wait = patience(tolerations)
    return None if wait is None else pod.not_ready_since + wait
