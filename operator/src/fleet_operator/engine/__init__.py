"""What keeps looking: the queue, the workers and the reconciler that carries plans out."""

from fleet_operator.engine.clock import Clock, SystemClock
from fleet_operator.engine.engine import Engine
from fleet_operator.engine.observer import Observer
from fleet_operator.engine.queue import WorkQueue
from fleet_operator.engine.reconcile import Reconciler, Result

__all__ = ["Clock", "Engine", "Observer", "Reconciler", "Result", "SystemClock", "WorkQueue"]
