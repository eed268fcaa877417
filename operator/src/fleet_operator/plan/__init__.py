"""Decisions about a job, as pure functions."""

from fleet_operator.plan.plan import plan

__all__ = ["plan"]
