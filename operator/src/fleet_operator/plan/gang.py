"""What a gang waits for: a queue that has not admitted it, or places for enough of its pods at once.

Schedulers say it in the conditions of the pods, and some in the status of the PodGroup. Kueue says it in a
Workload, which is not the operator's to read: of Kueue's only the pods' scheduling gates are seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import Gang
from fleet_operator.plan.advice import advised, as_reason
from fleet_operator.plan.model import PodPhase
from fleet_operator.plan.naming import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fleet_operator.plan.model import ObservedPod

__all__ = ["WAITS_FOR_OTHERS", "why_gang_waits"]

WAITS_FOR_OTHERS = frozenset({"Schedulable", "Undetermined"})
"""What Volcano says of a pod that could have a place if the others had one."""

_KUEUES = "kueue.x-k8s.io/"


def why_gang_waits(
    gang: Gang,
    name: str,
    namespace: str,
    *,
    pods: Iterable[ObservedPod],
    wanted: int,
    queue: str | None = None,
    held_back: str | None = None,
) -> tuple[str, str] | None:
    """Return why pods of a gang have no node, in a word and a sentence; None if it is not for the gang.

    Parameters
    ----------
    gang : Gang
        Who places it.
    name, namespace : str
        What it is called, and where it is.
    pods : iterable of ObservedPod
        Its pods.
    wanted : int
        How many of them must find places together.
    queue : str, optional
        The queue that it is in.
    held_back : str, optional
        What its PodGroup says while it waits.
    """
    waiting = [pod for pod in pods if pod.node is None and pod.phase is PodPhase.PENDING]
    if gang is Gang.NONE or not waiting:
        return None
    if gang is Gang.KUEUE:
        return _not_admitted(name, namespace, waiting, queue)
    return _not_placed(name, waiting, wanted, held_back)


def _not_admitted(
    name: str, namespace: str, waiting: Sequence[ObservedPod], queue: str | None
) -> tuple[str, str] | None:
    """Tell of a group that Kueue holds back; what else its pods wait for, each says for itself."""
    gated = [pod for pod in waiting if any(gate.startswith(_KUEUES) for gate in pod.gates)]
    if not gated:
        return None
    pod = gated[0]
    gates = ", ".join(gate for gate in pod.gates if gate.startswith(_KUEUES))
    said = f": {pod.message}" if pod.message else ""
    return "SchedulingGated", (
        f"Kueue's queue {queue} has not admitted the gang {name}: {some([each.name for each in gated])}"
        f" waits behind {gates}{said}; kubectl describe workload {name} -n {namespace} says why"
    )


def _not_placed(
    name: str, waiting: Sequence[ObservedPod], wanted: int, held_back: str | None
) -> tuple[str, str]:
    """Tell what the scheduler says of the pod that holds the others up, else of the group, if anything."""
    told = sorted((pod for pod in waiting if pod.reason), key=lambda pod: pod.reason in WAITS_FOR_OTHERS)
    places = "a place for 1 pod" if wanted == 1 else f"places for {wanted} pods together"
    without = "1 has" if len(waiting) == 1 else f"{len(waiting)} have"
    begin = f"the gang {name} needs {places}, and {without} none"
    if told:
        pod = told[0]
        said = f": {pod.message}" if pod.message else ""
        reason = "GangWaiting" if pod.reason in WAITS_FOR_OTHERS else as_reason(pod.reason, "GangWaiting")
        return reason, advised(reason, f"{begin}; {pod.name} waits, {pod.reason}{said}")
    if held_back:
        return "GangWaiting", advised("GangWaiting", f"{begin}; its PodGroup is {held_back}")
    silent = f"the scheduler {waiting[0].scheduler or 'of the gang'} has said nothing of them yet"
    return "GangWaiting", advised("GangWaiting", f"{begin}; {silent}")
