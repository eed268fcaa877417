"""Trainers that have joined loopback servers in this process, with their models and optimizers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fleet.parameter_server.trainer.optimizer import DistributedOptimizer
from fleet.tables import Placement
from tests.support.parameter_server import Loopback, loopback
from tests.support.threads import at_once, one_torch_thread
from tests.support.training import never_minimized

__all__ = ["joined", "make", "rows_on_servers"]


@contextmanager
def joined(
    trainers: int, of_trainer: dict[str, Any] | None = None, *, servers: int = 2, **arguments: Any
) -> Iterator[list[tuple[Any, Any, Any]]]:
    """Yield trainers that have joined, each with its module and distributed optimizer.

    Parameters
    ----------
    trainers : int
    of_trainer : dict, optional
        See `Loopback.make_trainer`.
    servers : int
    **arguments
        See `loopback`.
    """
    with one_torch_thread(), loopback(servers=servers, trainers=trainers, **arguments) as job:
        made = [make(job, index, **(of_trainer or {})) for index in range(trainers)]
        at_once(*(trainer.start for trainer, _, _ in made))
        yield made


def make(job: Loopback, index: int, **of_trainer: Any) -> tuple[Any, Any, Any]:
    """Return a trainer that has not joined yet, with its module and distributed optimizer."""
    trainer, model, wrapped = job.make_trainer(index, **of_trainer)
    optimizer = DistributedOptimizer(wrapped, never_minimized)
    optimizer.bind(trainer)
    return trainer, model, optimizer


def rows_on_servers(job: Loopback, num_rows: int, dimension: int, table: int = 0) -> torch.Tensor:
    """Return the first rows of a table, by id, as the servers store them."""
    ids, rows = np.arange(num_rows), torch.empty(num_rows, dimension)
    for server, at in Placement.over(len(job.servers)).positions(ids).items():
        rows[torch.from_numpy(at)] = job.servers[server].server._shard.tables.read(table, ids[at])
    return rows
