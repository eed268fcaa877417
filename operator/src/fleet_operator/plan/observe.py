"""From what was observed to the situation that is decided on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fleet_operator.api import Role
from fleet_operator.plan.completion import with_completions
from fleet_operator.plan.ledger import Ledger, Replica
from fleet_operator.plan.scaling import trainers_to_have
from fleet_operator.plan.situation import Situation

if TYPE_CHECKING:
    from datetime import datetime

    from fleet_operator.api import FleetJob
    from fleet_operator.build import Hosts
    from fleet_operator.plan.model import Observed

__all__ = ["situation_of"]


def situation_of(job: FleetJob, observed: Observed, now: datetime, hosts: Hosts) -> Situation:
    """Put what was observed in order, and enter into the ledger what was not known before."""
    pods = (pod for pod in observed.pods if pod.owned)
    ledger = Ledger.of(job.status).with_attempts((Replica(pod.role, pod.index), pod.attempt) for pod in pods)
    situation = with_completions(Situation(job, observed, now, hosts, ledger, job.replicas(Role.TRAINER)))
    return _with_trainers_to_have(situation) if job.elastic else situation


def _with_trainers_to_have(situation: Situation) -> Situation:
    """Return the same moment of an elastic job with as many trainers as it can have now."""
    job, ledger = situation.job, situation.ledger
    before, any_completed = job.status.role(Role.TRAINER).replicas, bool(ledger.roles[Role.TRAINER].completed)
    number = trainers_to_have(asked=situation.asked, before=before, any_completed=any_completed)
    ledger = ledger.without_surplus(Role.TRAINER, number)
    return replace(situation, job=job.with_trainers(number), ledger=ledger)
