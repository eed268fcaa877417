"""What the engine tells whoever counts: metrics in the operator, nobody in a local run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob
    from fleet_operator.cluster import Key
    from fleet_operator.engine.outcome import Result
    from fleet_operator.plan.model import Action


class Observer:
    """Hears of every pass and does nothing; metrics override what they count."""

    def passed(self, key: Key, result: Result, seconds: float) -> None:
        """Note that a pass over one job has ended, with `result`, after `seconds`."""

    def status_written(self, before: FleetJob, after: FleetJob) -> None:
        """Note that a job's status has been replaced."""

    def applied(self, job: FleetJob, action: Action) -> None:
        """Note that an action has been carried out."""

    def queued(self, depth: int) -> None:
        """Note how many keys wait for a worker now."""

    def waited(self, seconds: float) -> None:
        """Note how long a key has waited for a worker, from the first news of it."""
