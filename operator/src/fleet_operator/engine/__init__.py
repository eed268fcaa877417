"""The controller: the work queue, its workers, the reconciler and leader election."""

from fleet_operator.engine.election import Election, NotLeadingError
from fleet_operator.engine.engine import Engine
from fleet_operator.engine.passes import Clock, Observer, Result, SystemClock
from fleet_operator.engine.queue import WorkQueue
from fleet_operator.engine.reconcile import Reconciler

__all__ = [
    "Clock",
    "Election",
    "Engine",
    "NotLeadingError",
    "Observer",
    "Reconciler",
    "Result",
    "SystemClock",
    "WorkQueue",
]
