"""Decides what to do about a job, in pure functions."""

from fleet_operator.plan.plan import plan

__all__ = ["plan"]
