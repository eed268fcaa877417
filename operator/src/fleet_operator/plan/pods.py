"""What one observed pod means: its main container decides, not the sidecars beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.plan.model import PodPhase

if TYPE_CHECKING:
    from fleet_operator.plan.model import ObservedPod

__all__ = ["EXIT_PEER_LOST", "has_ended", "has_failed", "has_started", "has_succeeded", "is_active", "is_up"]

EXIT_PEER_LOST = 91
_ENDED = (PodPhase.SUCCEEDED, PodPhase.FAILED)


def has_succeeded(pod: ObservedPod) -> bool:
    """Whether the main container ended well; a sidecar may still run, or have failed."""
    return pod.exit_code == 0 if pod.exit_code is not None else pod.phase is PodPhase.SUCCEEDED


def has_failed(pod: ObservedPod) -> bool:
    """Whether the main container ended badly, or the pod ended without it having run."""
    return pod.exit_code != 0 if pod.exit_code is not None else pod.phase is PodPhase.FAILED


def has_ended(pod: ObservedPod) -> bool:
    """Whether the main container has ended, or can never run: how is known for good."""
    return pod.exit_code is not None or pod.phase in _ENDED


def has_started(pod: ObservedPod) -> bool:
    """Whether the pod got as far as to run."""
    return pod.phase is not PodPhase.PENDING or pod.exit_code is not None


def is_up(pod: ObservedPod) -> bool:
    """Whether the main container runs, as far as anybody knows: a silent node is not an ended pod."""
    return pod.phase in (PodPhase.RUNNING, PodPhase.UNKNOWN) and pod.exit_code is None


def is_active(pod: ObservedPod) -> bool:
    """Whether the pod still holds resources of a node, or will."""
    return pod.phase not in _ENDED
