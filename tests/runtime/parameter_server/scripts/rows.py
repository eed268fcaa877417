"""Trains a table on parameter servers; a trainer may be killed amid a step. Prints what it ends with."""

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
    for step in range(fleet.step, int(sys.argv[1])):
        generator = torch.Generator().manual_seed(100 * step + fleet.worker_index())
        loss = model(torch.randint(ROWS, (16, 8), generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if str(step) == os.environ.get("KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
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
