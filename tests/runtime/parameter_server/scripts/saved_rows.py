"""Trains a table beside a layer, and saves every two steps: all rows at first, then what has changed.

Arguments: the number of steps. The checkpoints are in ``FLEET_CHECKPOINT_DIR``, and the newest two that are
needed are kept. With ``DISK``, a folder, the servers have rows there.

``KILL_AT`` makes a server end as by kill -9 in the third save: amid the ``rows`` that have changed, before
its ``commit``, before it knows that all have committed (``tidy``), or before it is to ``remove`` the
second one.
"""

import hashlib
import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import torch

import fleet as names
from fleet.parameter_server import fleet
from fleet.parameter_server.server import shard_checkpointer
from fleet.tables import snapshot

ROWS, DIM = 6000, 4
POINTS = {"rows": "write_rows", "commit": "commit", "tidy": "tidy", "remove": "remove_numbers"}


def die(number: int) -> None:
    """End as by kill -9 in the third save."""
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_at(point: str) -> None:
    """Have this process end at a point of its third save."""
    name, calls = POINTS[point], 1 if point == "remove" else 0  # which comes with the second one first
    does = getattr(shard_checkpointer, name)

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if point == "rows":
            return does(*arguments[:-1], _cut(arguments[-1], calls))
        die(calls)
        return does(*arguments)

    setattr(shard_checkpointer, name, counted)


def _cut(parts: Iterator[Any], number: int) -> Iterator[Any]:
    yield next(parts)
    die(number)
    yield from parts


def main(steps: int) -> None:
    """Train, or serve."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fleet.init()
    disk = os.environ.get("DISK")
    storage = names.tables.LocalDisk(1, disk) if disk is not None else names.tables.Memory()
    table = names.nn.DistributedTable(
        "rows", DIM, ROWS, eviction=(names.tables.TimeToLive(4),), storage=storage
    )
    embedding = names.nn.DistributedEmbedding(ROWS, DIM, table=table)
    model = torch.nn.Sequential(embedding, torch.nn.Flatten(), torch.nn.Linear(32 * DIM, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.05))
    if fleet.is_server():
        snapshot.PART_BYTES = 2000  # type: ignore[misc] # so that there are many parts
        if (point := os.environ.get("KILL_AT")) is not None:
            kill_at(point)
        fleet.run_server()
        return
    fleet.init_worker()
    print(f"begins at step {fleet.step}", flush=True)
    while fleet.step < steps:
        ids = torch.randint(ROWS, (64, 32), generator=torch.Generator().manual_seed(fleet.step))
        optimizer.zero_grad()
        model(ids).sub(1.0).square().mean().backward()
        optimizer.step()
        if fleet.step % 2 == 0:
            fleet.save_check_point(
                os.environ["FLEET_CHECKPOINT_DIR"],
                fleet.TrainStatus(0),
                remain_all_checkpoint=False,
                incremental=True,
            )
    with torch.no_grad():
        values = [embedding(torch.arange(ROWS)), *model[2].parameters()]
    digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values))
    print(f"ends with {digest.hexdigest()}", flush=True)
    if (address := os.environ.get("METRICS")) is not None:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            print(answer.read().decode(), flush=True)
    fleet.stop_worker()


if __name__ == "__main__":
    main(int(sys.argv[1]))
