"""Who has completed: by the end of its own pod, or by what others have said of it as they ended.

A pod may be gone before anybody looks: the operator was away, or the pod was deleted in the moment after its
end. Then the words of those that ended well count: a parameter server ends so only when every trainer has
completed, and says which; a trainer names those of whom it knows. They count for replicas whose end nobody
has seen, and never against what was seen: a trainer that was seen to fail after it had completed has failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import Role
from fleet_operator.plan.ledger import RANK_ZERO
from fleet_operator.plan.pods import has_ended, has_started, has_succeeded
from fleet_operator.plan.words import parse_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleet_operator.plan.ledger import Ledger, Replica
    from fleet_operator.plan.model import ObservedPod
    from fleet_operator.plan.situation import Situation

__all__ = ["is_unseen", "with_completions"]


def with_completions(situation: Situation) -> Situation:
    """Enter into the ledger the replicas whose present pods were seen, and which of them have completed."""
    situation = situation.with_ledger(_with_own_ends(situation, Role.TRAINER))
    if Role.PSERVER in situation.job.roles:
        situation = situation.with_ledger(_with_own_ends(situation, Role.PSERVER))
    ledger = situation.ledger
    if unseen := [each for each in situation.replicas.wanted if is_unseen(situation, each)]:
        trainers = frozenset(each.index for each in unseen if each.role is Role.TRAINER)
        ledger = ledger.with_seen(Role.TRAINER, frozenset(), trainers & _named(situation))
        servers = frozenset(each.index for each in unseen if each.role is Role.PSERVER)
        wanted = range(situation.job.replicas(Role.TRAINER))
        if ledger.roles[Role.TRAINER].completed.issuperset(wanted):  # nobody is left for them to serve
            ledger = ledger.with_seen(Role.PSERVER, frozenset(), servers)
    return situation.with_ledger(ledger)


def _with_own_ends(situation: Situation, role: Role) -> Ledger:
    pods = [(each.index, pod) for each, pod in _seen(situation) if each.role is role]
    created = frozenset(index for index, _ in pods)
    ended_well = ((index, pod) for index, pod in pods if has_succeeded(pod))
    completed = frozenset(
        index for index, pod in ended_well if role is Role.TRAINER or _has_served(situation, pod)
    )
    return situation.ledger.with_seen(role, created, completed)


def is_unseen(situation: Situation, replica: Replica) -> bool:
    """Whether a replica may have ended unseen: it has no pod, or had none when it was replaced."""
    replicas, ledger = situation.replicas, situation.ledger
    if ledger.has_completed(replica):
        return False
    if replica in replicas.present:
        # One that runs says so itself, as it ends; what finds no peers has done nothing.
        return ledger.may_have_ended(replica) and replica in replicas.finding_nobody
    if ledger.is_replaced(replica) and not replicas.has_vanished(replica):  # the next pod is awaited
        return ledger.may_have_ended(replica)
    last = replicas.departed.get(replica)
    return last is None or not has_ended(last)


def _has_served(situation: Situation, server: ObservedPod) -> bool:
    """Whether a server that ended well did its part: else this is a failure, if nobody else says more."""
    wanted = range(situation.job.replicas(Role.TRAINER))
    return _may_have_served(situation) or parse_words(server.message).completed.issuperset(wanted)


def _may_have_served(situation: Situation) -> bool:
    """Whether a server that has ended well can have done its part.

    Every trainer must have run, in this pod of its or in one before; in an elastic job trainer 0, as the
    others may have come too late.
    """
    first = situation.replicas.present.get(RANK_ZERO)
    done = situation.ledger.has_completed(RANK_ZERO) or (first is not None and has_succeeded(first))
    if situation.job.elastic and done:
        return True
    trainers = (each for each in situation.replicas.wanted if each.role is Role.TRAINER)
    return all(_may_have_run(situation, each) for each in trainers)


def _may_have_run(situation: Situation, trainer: Replica) -> bool:
    """Whether a trainer runs or has run in the present life of the job, or may have, unseen."""
    replicas = situation.replicas
    if replicas.has_started(trainer) or situation.ledger.is_replaced(trainer):
        return True
    last = replicas.departed.get(trainer)
    return replicas.has_vanished(trainer) and (last is None or has_started(last))


def _named(situation: Situation) -> frozenset[int]:
    """Return the trainers of whom those that ended well say that they have completed."""
    named: set[int] = set()
    for replica, pod in _seen(situation):
        if not situation.ledger.has_completed(replica) or not has_succeeded(pod):
            continue
        words = parse_words(pod.message)
        named |= words.completed
        if words.joined is None and replica.role is Role.PSERVER and not (pod.deleted_at or pod.disruption):
            named.update(_served(situation))
    return frozenset(named)


def _served(situation: Situation) -> Iterator[int]:
    """Return the trainers that a server has served which ended well without a word; it waited for all.

    But not where trainers come and go: it may have given up some. And nobody serves one that never ran.
    """
    if situation.job.elastic:
        return
    for trainer in (each for each in situation.replicas.wanted if each.role is Role.TRAINER):
        if _may_have_run(situation, trainer):
            yield trainer.index


def _seen(situation: Situation) -> Iterator[tuple[Replica, ObservedPod]]:
    yield from situation.replicas.departed.items()
    yield from situation.replicas.present.items()
