"""Pure: the decisions about a job."""

from fleet_operator.plan.plan import plan

__all__ = ["plan"]
