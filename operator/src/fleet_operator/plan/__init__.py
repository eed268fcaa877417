"""Pure: the only place that decides what happens to a job."""

from fleet_operator.plan.plan import plan

__all__ = ["plan"]
