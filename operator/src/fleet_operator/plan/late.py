"""Trainers that find no servers any more: those of an elastic job that come too late, and those left behind.

Servers wait for every trainer that has joined them, and then end well. Who comes after that finds nobody. In
an elastic job such a trainer is not wanted any more; in any other, all replicas start anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import Role
from fleet_operator.plan.ledger import RANK_ZERO
from fleet_operator.plan.pods import EXIT_PEER_LOST, has_started, has_succeeded
from fleet_operator.plan.words import parse_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fleet_operator.plan.ledger import Ledger, Replica
    from fleet_operator.plan.model import ObservedPod

__all__ = ["find_nobody", "late_trainers"]


def late_trainers(pods: Mapping[Replica, ObservedPod | None], ledger: Ledger) -> frozenset[Replica]:
    """Return the trainers of an elastic job that have not joined before the others were done.

    Trainer 0 has completed then. Who runs says by its exit code that it found nobody any more, which counts
    once the servers have ended well or nobody is left for whom they stay; who has not begun to run once they
    have ended finds nobody either. One that had joined has been waited for by the servers, and so had one
    that failed so shortly before their end that they cannot have given it up.

    Parameters
    ----------
    pods : mapping of Replica to ObservedPod or None
        Every replica that the job asks for, and the pod of its present attempt.
    ledger : Ledger
        What has happened to the job.
    """
    if not ledger.has_completed(RANK_ZERO):
        return frozenset()
    trainers = {each: pod for each, pod in pods.items() if each.role is Role.TRAINER}
    rest = {each: pod for each, pod in trainers.items() if not ledger.has_completed(each)}
    lost = {each for each, pod in rest.items() if pod is not None and pod.exit_code == EXIT_PEER_LOST}
    if not ledger.roles[Role.PSERVER].completed:
        return frozenset(lost) if lost == rest.keys() else frozenset()
    unbegun = {each for each, pod in rest.items() if pod is None or not has_started(pod)}
    servers = [pod for each, pod in pods.items() if each.role is Role.PSERVER and pod is not None]
    return frozenset(each for each in lost | unbegun if not _failed_when_done(each, servers, ledger))


def _failed_when_done(trainer: Replica, servers: list[ObservedPod], ledger: Ledger) -> bool:
    """Whether a trainer failed so shortly before servers ended well that it was done with them.

    They had no time to give it up: they ended before its next pod might come, and the pause before that is
    shorter than their patience.
    """
    if not ledger.is_replaced(trainer):
        return False
    again = ledger.not_before_of(trainer)
    ends = (pod.finished_at for pod in servers if has_succeeded(pod))
    return again is not None and any(end is not None and end < again for end in ends)


def find_nobody(
    pods: Mapping[Replica, ObservedPod | None], servers: Iterable[ObservedPod]
) -> frozenset[Replica]:
    """Return the replicas that have found no peers, or will not.

    They have not begun, or their peers have ended before. A server that ended well says after how many
    restarts it knew a trainer: a later start of that has not joined it, and calls a port on which nobody
    listens.

    Parameters
    ----------
    pods : mapping of Replica to ObservedPod or None
        Every replica that is wanted, and the pod of its present attempt.
    servers : iterable of ObservedPod
        Those of the servers that have completed.
    """
    known = [parse_words(server.message).restarts for server in servers if has_succeeded(server)]
    return frozenset(each for each, pod in pods.items() if _finds_nobody(each, pod, known))


def _finds_nobody(replica: Replica, pod: ObservedPod | None, known: Iterable[Mapping[int, int]]) -> bool:
    """Whether one finds no peers: `known` is how often trainers had been restarted, as each server says."""
    if pod is None or not has_started(pod):
        return True
    if pod.exit_code is not None or replica.role is Role.PSERVER:
        return pod.exit_code == EXIT_PEER_LOST
    restarts = pod.attempt.restarts
    return any(said.get(replica.index, restarts) < restarts for said in known)
