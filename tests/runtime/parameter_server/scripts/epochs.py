"""Epochs over shuffled batches with two schedulers, in a loop that says what it does; one trainer may die.

Arguments: the number of epochs. ``KILL_AT_STEP`` makes a trainer end as by kill -9 in that step, between its
forward and its backward pass, once its last save is durable. ``LOOP=plain`` is a loop that knows nothing of
restarts. ``MODE`` names the mode. ``WORKERS`` is how many processes load the data. ``CHECKPOINTS`` is a
folder to which each trainer saves after each epoch. ``CONSTANT`` leaves the learning rate as it is.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from fleet import create_async_strategy, create_geo_strategy, create_half_async_strategy, create_sync_strategy
from fleet.parameter_server import fleet

STRATEGIES = {
    "async": create_async_strategy,
    "geo": create_geo_strategy,
    "half_async": create_half_async_strategy,
    "sync": create_sync_strategy,
}
SAMPLES = 80
"""In all: half of them each trainer's, in batches of 8."""


def main(epochs: int) -> None:
    """Train, or serve."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fleet.init()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    strategy = STRATEGIES[os.environ.get("MODE", "sync")]()
    optimizer = fleet.distributed_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy, model=model
    )
    constant = "CONSTANT" in os.environ
    by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0 if constant else 0.9)
    by_step = torch.optim.lr_scheduler.StepLR(optimizer, 7, 1.0 if constant else 0.8)
    if fleet.is_server():
        fleet.run_server()
        return
    fleet.init_worker()
    folder = os.environ.get("CHECKPOINTS")
    if folder:
        fleet.load_check_point(folder)
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    x = x[fleet.worker_index() :: fleet.worker_num()]
    workers = int(os.environ.get("WORKERS", "0"))
    loader = DataLoader(TensorDataset(torch.arange(len(x)), x), 8, shuffle=True, num_workers=workers)
    resuming = fleet.epochs(epochs, loader, by_epoch, step_scheduler=by_step)
    plain = ((epoch, loader) for epoch in range(epochs))
    for epoch, batches in plain if os.environ.get("LOOP") == "plain" else resuming:
        for numbers, batch in batches:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            if fleet.step == int(os.environ.get("KILL_AT_STEP", "-1")):
                while folder and not Path(folder, f"checkpoint-{epoch - 1}", "manifest.json").is_file():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            by_step.step()
            print("step", fleet.step, "epoch", epoch, "samples", numbers.tolist(), flush=True)
        by_epoch.step()
        if folder:
            fleet.save_check_point(folder, fleet.TrainStatus(epoch))
    fleet.stop_worker()
    print("rate", optimizer.param_groups[0]["lr"].hex())
    print("weights", [value.hex() for value in torch.cat([p.flatten() for p in model.parameters()]).tolist()])


if __name__ == "__main__":
    main(int(sys.argv[1]))
