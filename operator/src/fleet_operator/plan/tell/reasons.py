"""The reasons why a job is pending, each with a message and advice, as ``kubectl describe`` shows them.

A gang waits for its queue to admit it, or for enough of its pods to be schedulable at once. Schedulers report
this in the conditions of the pods, and some in the status of the PodGroup. Kueue reports it in a Workload,
which the operator reads if it may. Otherwise it sees only the pods' scheduling gates.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from fleet_operator.api import Gang, Role
from fleet_operator.api.names import KUEUE
from fleet_operator.plan.decide.creation import ensure
from fleet_operator.plan.decide.deletion import how_to_force, stuck_pods
from fleet_operator.plan.decide.quota import gives_back_at, is_pausing
from fleet_operator.plan.formats import some
from fleet_operator.plan.model import ObjectRef, PodPhase
from fleet_operator.plan.observe.pods import is_up, silent_since

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fleet_operator.build import Extra
    from fleet_operator.plan.model import ObservedPod
    from fleet_operator.plan.observe.attempts import Replica
    from fleet_operator.plan.observe.context import Context

__all__ = [
    "ADVICE",
    "PASSING",
    "WAITS_FOR_OTHERS",
    "PendingReason",
    "advised",
    "as_reason",
    "given_back_sentence",
    "trouble",
    "why_in_doubt",
    "why_not_created",
    "why_not_running",
    "why_unended",
]

_CREATE_AGAIN = "and create the job again"
_IMAGE = "correct the image's name, or set imagePullSecrets"

ADVICE = {
    # of a waiting pod
    "Unschedulable": "free or add nodes, or request less",
    "SchedulingGated": "the controller that set the pod's schedulingGates must remove them",
    "ErrImagePull": _IMAGE,
    "ImagePullBackOff": _IMAGE,
    "InvalidImageName": _IMAGE,
    "ErrImageNeverPull": "load the image onto the node, or let imagePullPolicy pull it",
    "CreateContainerConfigError": "create the Secret or ConfigMap that the template names",
    "CreateContainerError": "correct the template's command, user or mounts",
    "RunContainerError": "correct the template's command, user or mounts",
    "CrashLoopBackOff": "the container's log shows why it ends",
    "GangWaiting": "see the events of its pods and of its PodGroup",
    # of a job with an object that cannot be created yet
    "CreationRefused": "the creation is retried: free resources, or ask the owner of the limit or webhook",
    "Deactivated": "to queue the job again, set spec.suspend to true and then to false",
    "QuotaBackOff": "free resources, request less, or ask the owner of the quota for more",
    "FeatureDisabled": "enable it under features in the values of the operator's chart",
    "WaitingForParameterServers": "if this persists, see its log and its events",
    # of the end of a job
    "BackoffLimitExceeded": f"correct what its log shows, or raise the limit, {_CREATE_AGAIN}",
    "DeadlineExceeded": f"raise it, {_CREATE_AGAIN}",
    "DisruptionLimitExceeded": f"find out what ends its pods, or raise the limit, {_CREATE_AGAIN}",
    "PendingDeadlineExceeded": f"free resources for it {_CREATE_AGAIN}",
    "PermanentError": f"correct the script, its command or its image {_CREATE_AGAIN}",
    "PodRejected": f"correct the template {_CREATE_AGAIN}",
    "ReplicaFailed": f"correct what its log shows {_CREATE_AGAIN}",
}

_REASON = re.compile(r"[A-Z][A-Za-z0-9]*")

WAITS_FOR_OTHERS = frozenset({"Schedulable", "Undetermined"})
"""Volcano's reasons that show no problem of the pod itself, only an incomplete gang."""


# Transient reasons of every pod; any other reason is worth reporting.
PASSING = frozenset({"ContainerCreating", "PodInitializing"})


class PendingReason(NamedTuple):
    """The reason why a job is pending, and a message that explains it."""

    reason: str
    sentence: str


def why_not_created(context: Context, *, backed_off: Iterable[Replica], gated: bool) -> PendingReason | None:
    """Return why some pods do not exist, or None if all exist."""
    missing, past, name_of = context.replicas.missing, context.replicas.past, context.replicas.name_of
    extras = ensure(context.extras, context.observed)
    incomplete = missing or extras or not context.observed.service
    if context.foreign and incomplete:
        names = ", ".join(context.foreign)
        sentence = (
            f"{names} has a name that this job needs, but another owner;"
            " delete it, or create the job under another name"
        )
        return PendingReason("NameTaken", sentence)
    if (left_over := context.observed.left_over) and incomplete:
        sentence = (
            f"{some(sorted(left_over))} of a deleted job with this name still exists, and is being removed"
        )
        theirs = (pod for pod in context.observed.pods if f"Pod/{pod.name}" in left_over)
        return PendingReason("PredecessorTerminating", _or_forced(context, theirs, sentence))
    if (extra := context.unserved) is not None and incomplete:
        return PendingReason("FeatureDisabled", advised("FeatureDisabled", _disabled(extra)))
    if not missing:
        return None
    wanted = {name_of(each) for each in missing}
    if (since := context.ledger.deactivated) is not None:
        sentence = f"the Workload of this job was deactivated in Kueue at {since:%Y-%m-%d %H:%M:%S} UTC"
        return PendingReason("Deactivated", advised("Deactivated", _or_forced(context, past, sentence)))
    if is_pausing(context):
        return PendingReason("QuotaBackOff", advised("QuotaBackOff", given_back_sentence(context)))
    if leaving := sorted(pod.name for pod in past if pod.name in wanted):
        kept = dict.fromkeys(name for pod in past if pod.name in wanted for name in pod.finalizers)
        until = f"{', '.join(kept)} is removed from its finalizers" if kept else "it is gone"
        sentence = f"{some(leaving)} is being deleted; its name is in use until {until}"
        return PendingReason("PodTerminating", _or_forced(context, past, sentence))
    if refused := context.observed.refused:
        sentence = f"the API server temporarily refuses the missing objects: {refused}"
        if (due := gives_back_at(context)) is not None:
            sentence += f"; at {due:%H:%M:%S} UTC the job releases the pods that it has"
        return PendingReason("CreationRefused", advised("CreationRefused", sentence))
    if pausing := [name_of(each) for each in backed_off]:
        return PendingReason("BackOff", f"{some(pausing)} is created again after a pause")
    if gated:
        return _waiting_for_servers(context)
    return PendingReason("Creating", "pods are being created")


def given_back_sentence(context: Context) -> str:
    """Return a sentence about a job that released its pods because a quota refused the others."""
    again = context.ledger.quota.not_before if context.ledger.quota is not None else None
    until = f"{again:%H:%M:%S} UTC" if again is not None else "soon"
    because = f": {context.observed.refused}" if context.observed.over_quota else ""
    sentence = (
        f"the job has released its pods, because a quota does not admit all of them{because};"
        f" it requests all of them again at {until}"
    )
    return _or_forced(context, context.replicas.past, sentence)


def _or_forced(context: Context, pods: Iterable[ObservedPod], sentence: str) -> str:
    """Return the sentence; if there are stuck pods, append advice on deleting them."""
    command = how_to_force(pods, context.job.metadata.namespace, context.now)
    return "; ".join(filter(None, (sentence, command)))


def _waiting_for_servers(context: Context) -> PendingReason:
    """Return the reason that trainers wait for servers, naming one that is not ready."""
    reason = "WaitingForParameterServers"
    replicas = context.replicas
    slow = [each for each in replicas.wanted if each.role is Role.PSERVER and not replicas.is_ready(each)]
    there = [replicas.name_of(each) for each in slow if each in replicas.present]
    sentence = "trainers are created once all parameter servers are ready"
    if there:
        return PendingReason(reason, advised(reason, f"{sentence}: {some(there)} is not ready yet"))
    absent = [replicas.name_of(each) for each in slow]
    return PendingReason(reason, f"{sentence}: {some(absent)} does not exist yet")


def _disabled(extra: Extra) -> str:
    group = extra.manifest["apiVersion"].rpartition("/")[0]
    kind = f"{extra.manifest['kind']}.{group}" if group else extra.manifest["kind"]
    return f"{extra.field} needs a {kind}, which this operator is not configured to create"


def why_not_running(context: Context, not_created: PendingReason | None) -> PendingReason:
    """Return why some replicas are not running: a pod's problem, or the reason for missing pods."""
    if not_created is not None and not_created.reason != "Creating" and _is_gang_incomplete(context):
        return not_created  # no scheduler places a gang before its pods exist
    if (gang := _why_gang_waits(context)) is not None:
        return gang
    pod = trouble(context)
    if pod is not None:
        said = f": {pod.message}" if pod.message else ""
        reason = as_reason(pod.reason, "PodWaiting")
        return PendingReason(reason, advised(reason, f"{pod.name} is waiting, {pod.reason}{said}"))
    return not_created or PendingReason("Starting", _starting(context))


def _is_gang_incomplete(context: Context) -> bool:
    """Return whether fewer pods of a gang exist than must be scheduled together."""
    there = len(context.replicas.wanted) - len(context.replicas.missing)
    return context.job.gang is not Gang.NONE and there < context.job.min_member


def _why_gang_waits(context: Context) -> PendingReason | None:
    """Return why the pods of a gang have no node, or None if gang scheduling is not the cause."""
    pods = context.replicas.present.values()
    waiting = [pod for pod in pods if pod.node is None and pod.phase is PodPhase.PENDING]
    if context.job.gang is Gang.NONE or not waiting:
        return None
    why_not = _not_admitted if context.job.gang is Gang.KUEUE else _not_placed
    return why_not(context, context.job.gang_name(context.ledger.job_restarts), waiting)


def _not_admitted(context: Context, name: str, waiting: Sequence[ObservedPod]) -> PendingReason | None:
    """Return why Kueue holds back a group, or None if it does not."""
    gated = [pod for pod in waiting if any(gate.startswith(KUEUE) for gate in pod.gates)]
    if not gated:
        return None
    begin = f"Kueue's queue {context.job.queue_name} has not admitted the gang {name}"
    if context.observed.queue_message:
        return PendingReason("SchedulingGated", f"{begin}: {context.observed.queue_message}")
    pod, namespace = gated[0], context.job.metadata.namespace
    gates = ", ".join(gate for gate in pod.gates if gate.startswith(KUEUE))
    said = f": {pod.message}" if pod.message else ""
    return PendingReason(
        "SchedulingGated",
        f"{begin}: {some([each.name for each in gated])}"
        f" is gated by {gates}{said}; kubectl describe workload {name} -n {namespace} shows why",
    )


def _not_placed(context: Context, name: str, waiting: Sequence[ObservedPod]) -> PendingReason:
    """Return why the scheduler has not placed a gang's pods."""
    with_reasons = sorted(
        (pod for pod in waiting if pod.reason), key=lambda pod: pod.reason in WAITS_FOR_OTHERS
    )
    wanted = context.job.min_member
    places = "a node for 1 pod" if wanted == 1 else f"nodes for {wanted} pods together"
    without = "1 has" if len(waiting) == 1 else f"{len(waiting)} have"
    begin = f"the gang {name} needs {places}, but {without} none"
    if with_reasons:
        pod = with_reasons[0]
        said = f": {pod.message}" if pod.message else ""
        reason = "GangWaiting" if pod.reason in WAITS_FOR_OTHERS else as_reason(pod.reason, "GangWaiting")
        return PendingReason(reason, advised(reason, f"{begin}; {pod.name} is waiting, {pod.reason}{said}"))
    groups = (context.observed.objects.get(ObjectRef.of(each.manifest)) for each in context.extras)
    if held_back := next((each.held_back for each in groups if each is not None and each.held_back), None):
        return PendingReason("GangWaiting", advised("GangWaiting", f"{begin}; its PodGroup is {held_back}"))
    silent = f"the scheduler {waiting[0].scheduler or 'of the gang'} has not reported on them yet"
    return PendingReason("GangWaiting", advised("GangWaiting", f"{begin}; {silent}"))


def why_unended(context: Context, pods: Iterable[ObservedPod]) -> PendingReason | None:
    """Return a reason that names stuck pods, or None if no pod is stuck."""
    pods = tuple(pods)
    stuck = stuck_pods(pods, context.now)
    if not stuck:
        return None
    return PendingReason("PodTerminating", _or_forced(context, pods, f"{some(stuck)} is being deleted"))


def why_in_doubt(context: Context) -> PendingReason | None:
    """Return why replicas that count as running may in fact not be running, or None.

    Their node is silent, or their pod was deleted and its end is not confirmed yet.
    """
    replicas = context.replicas
    if not context.silent_nodes:
        return why_unended(context, replicas.present.values())
    replica, given_up = next(iter(context.silent_nodes.items()))
    pod, names = replicas.present[replica], [replicas.name_of(each) for each in context.silent_nodes]
    until = "without a time limit" if given_up is None else f"until {given_up:%H:%M:%S} UTC"
    return PendingReason(
        "NodeNotReady",
        f"{some(names)} is on node {pod.node}, which is {silent_since(pod)}; the job waits for it {until}",
    )


def trouble(context: Context) -> ObservedPod | None:
    """Return the pod with the most relevant persistent problem, or None."""
    with_reasons = [pod for pod in _not_running(context) if pod.reason and pod.reason not in PASSING]
    return next(
        (pod for pod in with_reasons if pod.reason not in WAITS_FOR_OTHERS), next(iter(with_reasons), None)
    )


def _not_running(context: Context) -> Iterator[ObservedPod]:
    """Yield the pods that are neither running nor ended."""
    for pod in context.replicas.present.values():
        if not is_up(pod) and pod.exit_code is None:
            yield pod


def _starting(context: Context) -> str:
    """Return a sentence about pods that have not started yet and report no problem."""
    slow = [pod.name for pod in _not_running(context)]
    if not slow:
        return "all pods exist, but not all of them run yet"
    sentence = f"{some(slow)} is being started; if this persists, see its events"
    if (tls := context.job.tls) is None:
        return sentence
    # The kubelet reports a missing Secret only in an event, which the operator may not read.
    return f"{sentence}, for example about a missing Secret {tls.secret_name} (spec.network.tls)"


def advised(reason: str, sentence: str) -> str:
    """Return the sentence, with advice appended if its reason requires action."""
    advice = ADVICE.get(reason)
    return f"{sentence.rstrip('. ')}; {advice}" if advice else sentence


def as_reason(word: str | None, otherwise: str) -> str:
    """Return `word`, set by a node or webhook, if it is a valid condition reason, else `otherwise`."""
    return word if word and _REASON.fullmatch(word) else otherwise
