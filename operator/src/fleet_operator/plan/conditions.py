"""Conditions as they follow one another: what is told anew, and what stays, of other versions as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import Condition, ConditionStatus, ConditionType
from fleet_operator.plan.times import stamp

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from fleet_operator.api import FleetJobStatus

__all__ = ["Told", "conditions"]

Told = tuple[bool, str, str]  # whether a condition holds, its reason, its sentence


def conditions(
    before: FleetJobStatus, told: Mapping[ConditionType, Told], *, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Return the next conditions.

    Parameters
    ----------
    before : FleetJobStatus
        The last status. What is not told anew stays; what this version does not know comes last.
    told : mapping
        What is known at this moment.
    generation : int
        The job's, of which it is known.
    now : datetime
        The time of what changes.
    """
    result = []
    for kind in ConditionType:
        old = before.condition(kind)
        if kind not in told:
            result += [old] if old is not None else []
            continue
        holds, reason, message = told[kind]
        status = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
        same = old is not None and old.status is status
        result.append(
            Condition(
                type=kind,
                status=status,
                reason=reason,
                message=message,
                last_transition_time=old.last_transition_time if old and same else stamp(now),
                observed_generation=generation,
            )
        )
    result += [each for each in before.conditions if each.type not in tuple(ConditionType)]
    return tuple(result)
