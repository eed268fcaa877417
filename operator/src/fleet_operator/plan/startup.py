"""Startup policy: whether trainers may be created yet."""

from __future__ import annotations

from fleet_operator.api import StartupPolicy

__all__ = ["may_start_trainers"]


def may_start_trainers(policy: StartupPolicy, *, gang: bool, servers: int, up: int) -> bool:
    """Whether trainers may be created when `up` of the job's servers are ready or have completed.

    A gang finds places for all pods or for none, so all of its pods must be there. A job without parameter
    servers never waits. Trainers that run already are left alone whatever their servers do: this is about new
    ones only.
    """
    return gang or policy is StartupPolicy.ANY_ORDER or up >= servers
