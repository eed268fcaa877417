"""Why a job does not run yet, in a word and a sentence: what a person must see in ``kubectl describe``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fleet_operator.api import Gang, Role
from fleet_operator.api.names import gang_name
from fleet_operator.plan.advice import advised, as_reason
from fleet_operator.plan.extras import ensure
from fleet_operator.plan.gang import WAITS_FOR_OTHERS, why_gang_waits
from fleet_operator.plan.model import ObjectRef
from fleet_operator.plan.naming import some
from fleet_operator.plan.node_loss import silent_since
from fleet_operator.plan.pods import is_up
from fleet_operator.plan.quota import gives_back_at, is_pausing
from fleet_operator.plan.terminating import how_to_force, stuck_pods

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fleet_operator.build import Extra
    from fleet_operator.plan.ledger import Replica
    from fleet_operator.plan.model import ObservedPod
    from fleet_operator.plan.situation import Situation

__all__ = [
    "PASSING",
    "Waiting",
    "given_back_sentence",
    "trouble",
    "why_in_doubt",
    "why_not_created",
    "why_not_running",
    "why_unended",
]

# What every pod passes through; anything else that a pod waits for is worth telling.
PASSING = frozenset({"ContainerCreating", "PodInitializing"})


class Waiting(NamedTuple):
    """Why something has not happened yet."""

    reason: str
    sentence: str


def why_not_created(situation: Situation, *, backed_off: Iterable[Replica], gated: bool) -> Waiting | None:
    """Return why not all pods are there, or None if they are."""
    missing, past, name_of = situation.replicas.missing, situation.replicas.past, situation.replicas.name_of
    extras = ensure(situation.extras, situation.observed)
    incomplete = missing or extras or not situation.observed.service
    if situation.foreign and incomplete:
        names = ", ".join(situation.foreign)
        sentence = (
            f"{names} has a name of this job but belongs to somebody else;"
            " delete it, or create the job under another name"
        )
        return Waiting("NameTaken", sentence)
    if (left_over := situation.observed.left_over) and incomplete:
        sentence = (
            f"{some(sorted(left_over))} of a deleted job of this name is still there; it is being removed"
        )
        theirs = (pod for pod in situation.observed.pods if f"Pod/{pod.name}" in left_over)
        return Waiting("PredecessorTerminating", _or_forced(situation, theirs, sentence))
    if (extra := situation.unserved) is not None and incomplete:
        return Waiting("FeatureDisabled", advised("FeatureDisabled", _disabled(extra)))
    if not missing:
        return None
    wanted = {name_of(each) for each in missing}
    if is_pausing(situation):
        return Waiting("QuotaBackOff", advised("QuotaBackOff", given_back_sentence(situation)))
    if leaving := sorted(pod.name for pod in past if pod.name in wanted):
        kept = dict.fromkeys(name for pod in past if pod.name in wanted for name in pod.finalizers)
        until = f"{', '.join(kept)} lets go of it" if kept else "it is gone"
        sentence = f"{some(leaving)} is being deleted; its name is taken until {until}"
        return Waiting("PodTerminating", _or_forced(situation, past, sentence))
    if refused := situation.observed.refused:
        sentence = f"the API server refuses what is missing, for now: {refused}"
        if (due := gives_back_at(situation)) is not None:
            sentence += f"; at {due:%H:%M:%S} UTC the job gives back the pods that it has"
        return Waiting("CreationRefused", advised("CreationRefused", sentence))
    if pausing := [name_of(each) for each in backed_off]:
        return Waiting("BackOff", f"{some(pausing)} is created again after a pause")
    if gated:
        return _waiting_for_servers(situation)
    return Waiting("Creating", "pods are being created")


def given_back_sentence(situation: Situation) -> str:
    """Say that the job waits with nothing because a quota has no room for all of it."""
    again = situation.ledger.quota.not_before if situation.ledger.quota is not None else None
    until = f"{again:%H:%M:%S} UTC" if again is not None else "soon"
    because = f": {situation.observed.refused}" if situation.observed.over_quota else ""
    sentence = (
        f"the job has given its pods back, because a quota has no room for all of them{because};"
        f" it asks for all of them again at {until}"
    )
    return _or_forced(situation, situation.replicas.past, sentence)


def _or_forced(situation: Situation, pods: Iterable[ObservedPod], sentence: str) -> str:
    """Return a sentence about pods that are being deleted, with what to do about those that do not go."""
    command = how_to_force(pods, situation.job.metadata.namespace, situation.now)
    return "; ".join(filter(None, (sentence, command)))


def _waiting_for_servers(situation: Situation) -> Waiting:
    """Return which servers the trainers wait for: those that are there, whose logs may say why, go first."""
    reason = "WaitingForParameterServers"
    replicas = situation.replicas
    slow = [each for each in replicas.wanted if each.role is Role.PSERVER and not replicas.is_ready(each)]
    there = [replicas.name_of(each) for each in slow if each in replicas.present]
    sentence = "trainers are created once all parameter servers are ready"
    if there:
        return Waiting(reason, advised(reason, f"{sentence}: {some(there)} is not yet"))
    absent = [replicas.name_of(each) for each in slow]
    return Waiting(reason, f"{sentence}: {some(absent)} is not created yet")


def _disabled(extra: Extra) -> str:
    group = extra.manifest["apiVersion"].rpartition("/")[0]
    kind = f"{extra.manifest['kind']}.{group}" if group else extra.manifest["kind"]
    return f"{extra.field} needs a {kind}, which this operator is not set up to make"


def why_not_running(situation: Situation, not_created: Waiting | None) -> Waiting:
    """Return why not every replica runs: the first trouble of any pod, else why pods are missing."""
    if not_created is not None and not_created.reason != "Creating" and _is_gang_incomplete(situation):
        return not_created  # no scheduler places a gang before its pods are there
    if (gang := _why_gang_waits(situation)) is not None:
        return gang
    pod = trouble(situation)
    if pod is not None:
        said = f": {pod.message}" if pod.message else ""
        reason = as_reason(pod.reason, "PodWaiting")
        return Waiting(reason, advised(reason, f"{pod.name} waits, {pod.reason}{said}"))
    return not_created or Waiting("Starting", _starting(situation))


def _is_gang_incomplete(situation: Situation) -> bool:
    """Whether a gang has fewer pods than must find places together."""
    there = len(situation.replicas.wanted) - len(situation.replicas.missing)
    return situation.job.gang is not Gang.NONE and there < situation.job.min_available


def _why_gang_waits(situation: Situation) -> Waiting | None:
    scheduling = situation.job.spec.scheduling
    if scheduling is None:
        return None
    found = (situation.observed.objects.get(ObjectRef.of(each.manifest)) for each in situation.extras)
    held_back = (each.held_back for each in found if each is not None)
    why = why_gang_waits(
        situation.job.gang,
        gang_name(situation.job.name, situation.ledger.job_restarts),
        situation.job.metadata.namespace,
        pods=situation.replicas.present.values(),
        wanted=situation.job.min_available,
        queue=scheduling.queue,
        held_back=next(filter(None, held_back), None),
    )
    return None if why is None else Waiting(*why)


def why_unended(situation: Situation, pods: Iterable[ObservedPod]) -> Waiting | None:
    """Return which of these pods do not go, though they are being deleted, until a person sees to it."""
    pods = tuple(pods)
    stuck = stuck_pods(pods, situation.now)
    if not stuck:
        return None
    return Waiting("PodTerminating", _or_forced(situation, pods, f"{some(stuck)} is being deleted"))


def why_in_doubt(situation: Situation) -> Waiting | None:
    """Return why replicas that are taken to run may not do so: nobody has heard of a node for a while.

    Or a pod was deleted, and nobody has said yet that it has ended.
    """
    replicas = situation.replicas
    if not situation.silent_nodes:
        return why_unended(situation, replicas.present.values())
    replica, given_up = next(iter(situation.silent_nodes.items()))
    pod, names = replicas.present[replica], [replicas.name_of(each) for each in situation.silent_nodes]
    until = "for as long as it takes" if given_up is None else f"until {given_up:%H:%M:%S} UTC"
    return Waiting(
        "NodeNotReady",
        f"{some(names)} is on node {pod.node}, which is {silent_since(pod)}; the node is waited for {until}",
    )


def trouble(situation: Situation) -> ObservedPod | None:
    """Return the first pod that waits for something that does not just pass, and not only for the others."""
    told = [pod for pod in _not_running(situation) if pod.reason and pod.reason not in PASSING]
    return next((pod for pod in told if pod.reason not in WAITS_FOR_OTHERS), next(iter(told), None))


def _not_running(situation: Situation) -> Iterator[ObservedPod]:
    """Return the pods that do not run and have not ended."""
    for pod in situation.replicas.present.values():
        if not is_up(pod) and pod.exit_code is None:
            yield pod


def _starting(situation: Situation) -> str:
    """Name the pods that are there but do not run, though nobody has said yet that anything is wrong."""
    slow = [pod.name for pod in _not_running(situation)]
    if not slow:
        return "the pods are there, but not all of them run yet"
    sentence = f"{some(slow)} is being started; if it stays so, its events say why"
    if (tls := situation.job.tls) is None:
        return sentence
    # The kubelet says it in an event only, which the operator may not read.
    return f"{sentence}, such as a Secret {tls.secret_name} (spec.network.tls) that is not there"
