"""Trainers that have joined loopback servers in this process, each with its model and its optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fleet.parameter_server.trainer.optimizer import DistributedOptimizer
from tests.support.parameter_server import loopback
from tests.support.threads import at_once, one_torch_thread
from tests.support.training import never_minimized

__all__ = ["joined"]


@contextmanager
def joined(
    trainers: int, of_trainer: dict[str, Any] | None = None, *, servers: int = 2, **arguments: Any
) -> Iterator[list[tuple[Any, Any, Any]]]:
    """Give each trainer with its module and its distributed optimizer.

    Parameters
    ----------
    trainers : int
    of_trainer : dict, optional
        As of `Loopback.make_trainer`.
    servers : int
    **arguments
        As of `loopback`.
    """
    with one_torch_thread(), loopback(servers=servers, trainers=trainers, **arguments) as job:
        made = []
        for index in range(trainers):
            trainer, model, wrapped = job.make_trainer(index, **(of_trainer or {}))
            optimizer = DistributedOptimizer(wrapped, never_minimized)
            optimizer.bind(trainer)
            made.append((trainer, model, optimizer))
        at_once(*(trainer.start for trainer, _, _ in made))
        yield made
