"""Trains a table in async mode whose rows count how often their ids came, and prints how many are wrong.

Arguments: the number of steps. ``KILL_AT`` makes a trainer end as by kill -9 in that step, as soon as it has
asked for the rows of the batch after it.
"""

import os
import signal
import sys

import torch

import fleet as names
from fleet import create_async_strategy
from fleet.parameter_server import fleet

ROWS, DIM = 300, 2


def ids_of(step: int, trainer: int) -> torch.Tensor:
    """Return the ids of a trainer's batch."""
    generator = torch.Generator().manual_seed(100 * step + trainer)
    return torch.randint(ROWS, (64,), generator=generator)


def main(num_steps: int) -> None:
    fleet.init()
    zeros = names.tables.Constant(0.0)
    rows = names.nn.DistributedTable("rows", DIM, ROWS, first_values=zeros)
    table = names.nn.DistributedEmbedding(ROWS, DIM, table=rows)
    optimizer = fleet.distributed_optimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), create_async_strategy(), model=table
    )
    if fleet.is_server():
        fleet.run_server()
        return
    fleet.init_worker()
    print(f"begins at step {fleet.step}", flush=True)
    mine = fleet.worker_index()
    for step in names.prefetch(range(fleet.step, num_steps), {table: lambda step: ids_of(step, mine)}):
        if str(step) == os.environ.get("KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (-table(ids_of(step, mine))).sum().backward()
        optimizer.step()
    fleet.barrier_worker()
    with torch.no_grad():
        found = table(torch.arange(ROWS))
    batches = [ids_of(step, trainer) for step in range(num_steps) for trainer in range(fleet.worker_num())]
    expected = torch.bincount(torch.cat(batches), minlength=ROWS).float()
    print(f"{int((found != expected[:, None]).sum())} counts are wrong", flush=True)
    fleet.barrier_worker()
    fleet.stop_worker()


if __name__ == "__main__":
    main(int(sys.argv[1]))
