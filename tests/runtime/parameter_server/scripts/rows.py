"""Trains a table on parameter servers, and prints what it ends with.

Arguments: the number of steps. ``AHEAD`` fetches the rows of the next batch. ``KILL_AT`` makes a trainer end
as by kill -9 in that step: between its backward pass and its step; with ``KILL_ASKED``, as soon as it has
asked for the rows of the batch after it.
"""

import hashlib
import os
import signal
import sys
import urllib.request
from pathlib import Path

import torch

import fleet as names
from fleet.parameter_server import fleet

ROWS, DIM = 200, 4


def ids_of(step: int) -> torch.Tensor:
    """Return the ids of this trainer's batch."""
    generator = torch.Generator().manual_seed(100 * step + fleet.worker_index())
    return torch.randint(ROWS, (16, 8), generator=generator)


def may_die(step: int, *, asked: bool) -> None:
    """End as by kill -9, if it is to be here."""
    if str(step) == os.environ.get("KILL_AT") and asked == ("KILL_ASKED" in os.environ):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    fleet.init()
    torch.manual_seed(0)
    table = names.nn.DistributedEmbedding(ROWS, DIM, name="rows")
    model = torch.nn.Sequential(table, torch.nn.Flatten(), torch.nn.Linear(8 * DIM, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.05))
    if fleet.is_server():
        fleet.run_server()
        return
    fleet.init_worker()
    print(f"begins at step {fleet.step}", flush=True)
    steps = range(fleet.step, int(sys.argv[1]))
    for step in names.prefetch(steps, {table: ids_of} if "AHEAD" in os.environ else {}):
        may_die(step, asked=True)
        loss = model(ids_of(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        may_die(step, asked=False)
        optimizer.step()
    fleet.barrier_worker()
    with torch.no_grad():
        found = table(torch.arange(ROWS))
    print(f"rows {hashlib.sha256(found.numpy().tobytes()).hexdigest()}", flush=True)
    if (address := os.environ.get("METRICS")) is not None:  # between the barriers, when nothing changes
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            print(answer.read().decode(), flush=True)
    if (directory := os.environ.get("EXPORT")) is not None:
        fleet.save_inference_model(directory, table_ids={"rows": [7, 3, 199]})
        torch.save(found, Path(directory) / "rows.pt")
    fleet.barrier_worker()
    fleet.stop_worker()


if __name__ == "__main__":
    main()
