"""What a person can do about it: half a sentence for each reason that does not pass by itself."""

from __future__ import annotations

import re

__all__ = ["ADVICE", "advised", "as_reason"]

_CREATE_AGAIN = "and create the job again"
_IMAGE = "correct the image's name, or give imagePullSecrets"

ADVICE = {
    # of a pod that waits
    "Unschedulable": "free or add nodes, or ask for less",
    "SchedulingGated": "whoever set the pod's schedulingGates must remove them",
    "ErrImagePull": _IMAGE,
    "ImagePullBackOff": _IMAGE,
    "InvalidImageName": _IMAGE,
    "ErrImageNeverPull": "load the image onto the node, or let imagePullPolicy pull it",
    "CreateContainerConfigError": "create the Secret or ConfigMap that the template names",
    "CreateContainerError": "correct the template's command, user or mounts",
    "RunContainerError": "correct the template's command, user or mounts",
    "CrashLoopBackOff": "the container's log says why it ends",
    "GangWaiting": "the events of its pods and of its PodGroup say more",
    # of what cannot be created yet
    "CreationRefused": "it is tried again: make room, or ask whoever set the limit or runs the webhook",
    "QuotaBackOff": "make room, ask for less, or ask whoever set the quota",
    "FeatureDisabled": "have it enabled under features in the values of the operator's chart",
    "WaitingForParameterServers": "if it stays so, its log and its events say why",
    # of the end of a job
    "BackoffLimitExceeded": f"correct what its log shows, or raise the limit, {_CREATE_AGAIN}",
    "DeadlineExceeded": f"raise it, {_CREATE_AGAIN}",
    "PendingDeadlineExceeded": f"make room for it {_CREATE_AGAIN}",
    "PermanentError": f"correct the script, its command or its image {_CREATE_AGAIN}",
    "PodRejected": f"correct the template {_CREATE_AGAIN}",
    "ReplicaFailed": f"correct what its log shows {_CREATE_AGAIN}",
}

_REASON = re.compile(r"[A-Z][A-Za-z0-9]*")


def advised(reason: str, sentence: str) -> str:
    """Return a sentence with what to do about its reason, where somebody must do something."""
    advice = ADVICE.get(reason)
    return f"{sentence.rstrip('. ')}; {advice}" if advice else sentence


def as_reason(word: str | None, otherwise: str) -> str:
    """Return a word that a node or a webhook has given, if a condition's reason may be it."""
    return word if word and _REASON.fullmatch(word) else otherwise
