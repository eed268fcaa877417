"""Pure functions that reduce the manifests of pods and other objects to the data that decisions use."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from fleet_operator.api import Role
from fleet_operator.api.names import (
    ANNOTATION_MADE_FROM,
    ANNOTATION_MAIN,
    JOB_KEY,
    LABEL_ATTEMPT,
    LABEL_INDEX,
    LABEL_ROLE,
    MAIN_CONTAINER,
)
from fleet_operator.build import assigned_ports
from fleet_operator.plan.model import Attempt, ObservedObject, ObservedPod, PodPhase
from fleet_operator.plan.tell.reasons import PASSING

if TYPE_CHECKING:
    from collections.abc import Mapping

WAITING_PHASES = ("Pending", "Inqueue", "PreScheduling", "Scheduling")
"""The phases of a PodGroup (Volcano, scheduler-plugins) in which not all of its pods are scheduled."""


def observe_pod(manifest: Mapping[str, Any]) -> ObservedPod | None:
    """Reduce a pod to the data that decisions use; return None if its labels identify no replica.

    The exit code, reason and message are those of the main container, which an annotation names. If it never
    ran, they are those of the container that kept it from running: a failed init container, or one whose
    image cannot be pulled, so that the pod remains Pending. If no container ran at all, they are those of the
    pod itself (Unschedulable, Evicted, …).
    """
    metadata, status = manifest["metadata"], manifest.get("status") or {}
    labels = metadata.get("labels") or {}
    role, index = labels.get(LABEL_ROLE), labels.get(LABEL_INDEX, "")
    if role not in tuple(Role) or not index.isdigit():
        return None
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    not_ready = _why_not_ready(ready)
    disruption, disruption_message = _disruption(conditions)
    container, state = _speaker(main_container(manifest), status)
    ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    reason, message = _why(ended or waiting, status, conditions)
    variables = _variables(manifest)
    metrics_port = variables.get("FLEET_METRICS_PORT") or ""
    phase = status.get("phase", PodPhase.PENDING)
    return ObservedPod(
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata.get("resourceVersion"),
        role=Role(role),
        index=int(index),
        attempt=Attempt.parse(labels.get(LABEL_ATTEMPT, "")),
        phase=PodPhase(phase) if phase in tuple(PodPhase) else PodPhase.UNKNOWN,
        ready=ready.get("status") == "True",
        not_ready_reason=not_ready,
        not_ready_since=_time(ready.get("lastTransitionTime")) if not_ready else None,
        disruption=disruption,
        disruption_message=disruption_message,
        deleted_at=_time(metadata.get("deletionTimestamp")),
        created_at=_time(metadata.get("creationTimestamp")),
        started_at=_time(ended.get("startedAt") or (state.get("running") or {}).get("startedAt")),
        finished_at=_time(ended.get("finishedAt")),
        container=container,
        exit_code=ended.get("exitCode"),
        reason=reason,
        message=message,
        scheduler=manifest["spec"].get("schedulerName"),
        gates=tuple(each["name"] for each in manifest["spec"].get("schedulingGates") or ()),
        finalizers=tuple(metadata.get("finalizers") or ()),
        node=manifest["spec"].get("nodeName"),
        ip=status.get("podIP"),
        key=variables.get(JOB_KEY) or None,
        metrics_port=int(metrics_port) if metrics_port.isdecimal() else None,
        assigned_ports=assigned_ports(variables) if manifest["spec"].get("hostNetwork") else (),
    )


def observe_object(kind: str, manifest: Mapping[str, Any]) -> ObservedObject:
    """Reduce an additional object to its digest and, for a pending PodGroup, the reason why it is pending."""
    metadata, status = manifest["metadata"], manifest.get("status") or {}
    made_from = (metadata.get("annotations") or {}).get(ANNOTATION_MADE_FROM)
    held_back = None
    if kind == "PodGroup" and status.get("phase") in WAITING_PHASES:
        conditions = {each["type"]: each for each in status.get("conditions") or ()}
        message = conditions.get("Unschedulable", {}).get("message")
        held_back = ": ".join(filter(None, (status["phase"], message)))
    return ObservedObject(None if metadata.get("deletionTimestamp") else made_from, held_back)


def main_container(manifest: Mapping[str, Any]) -> str:
    """Return the name of the main container, which is annotated because webhooks may add containers."""
    names = [each["name"] for each in manifest["spec"]["containers"]]
    said = (manifest["metadata"].get("annotations") or {}).get(ANNOTATION_MAIN)
    if said in names:
        return str(said)
    return MAIN_CONTAINER if MAIN_CONTAINER in names else str(names[0])


def job_key(manifest: Mapping[str, Any]) -> str | None:
    """Return the job key from the main container's environment, or None."""
    return _variables(manifest).get(JOB_KEY) or None


def _variables(manifest: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the main container's environment variables; the value is None for those that use valueFrom."""
    main = main_container(manifest)
    container = next(each for each in manifest["spec"]["containers"] if each["name"] == main)
    return {each["name"]: each.get("value") for each in container.get("env") or ()}


def _speaker(main: str, status: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Return the name and state of the container that explains why the pod failed or does not start."""
    ran = {each["name"]: each.get("state") or {} for each in status.get("containerStatuses") or ()}
    init = {each["name"]: each.get("state") or {} for each in status.get("initContainerStatuses") or ()}
    if status.get("phase") == PodPhase.FAILED and "terminated" not in ran.get(main, {}):
        for name, state in {**init, **ran}.items():
            if (state.get("terminated") or {}).get("exitCode"):
                return name, state
    if status.get("phase") == PodPhase.PENDING and "terminated" not in ran.get(main, {}):
        for name, state in {main: ran.get(main, {}), **init, **ran}.items():
            if (state.get("waiting") or {}).get("reason") not in {None, *PASSING}:
                return name, state
    return main, ran.get(main, {})


def _why(
    state: Mapping[str, Any], status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]
) -> tuple[str | None, str | None]:
    """Return a pod's reason and message, from its status, its container or the scheduler."""
    scheduled = conditions.get("PodScheduled", {})
    for told in (status, state, scheduled if scheduled.get("status") == "False" else {}):
        if told.get("reason") or told.get("message"):
            return told.get("reason"), (told.get("message") or "").strip() or None
    return None, None


def _why_not_ready(ready: Mapping[str, Any]) -> str | None:
    """Return why a pod's Ready condition is not True, or None if it is True or missing."""
    if ready.get("status") not in ("False", "Unknown"):
        return None
    return ready.get("reason") or "NodeNotReady"


def _disruption(conditions: Mapping[str, Mapping[str, Any]]) -> tuple[str | None, str | None]:
    """Return why Kubernetes or Kueue terminates a pod, and Kueue's message, if any.

    Kueue's reason only says that it stopped the pods; its message says why. Kubernetes' reasons say enough.
    """
    for kind in ("DisruptionTarget", "TerminationTarget"):
        condition = conditions.get(kind, {})
        if condition.get("status") == "True":
            message = condition.get("message") if kind == "TerminationTarget" else None
            return str(condition.get("reason") or kind), message or None
    return None, None


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
