"""The next step for one job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.plan.model import Observed, Plan

if TYPE_CHECKING:
    from datetime import datetime

    from fleet_operator.api import FleetJob
    from fleet_operator.build import Hosts

__all__ = ["plan"]


def plan(job: FleetJob, observed: Observed, now: datetime, hosts: Hosts) -> Plan:  # noqa: ARG001
    """Decide the next step for one job. Same arguments, same plan: no clock, no API, no log."""
    return Plan(status=job.status)
