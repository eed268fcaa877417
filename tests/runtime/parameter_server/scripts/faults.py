"""A loop that something happens to: trainers load their data in forked workers, and one may kill itself.

Arguments: the number of steps. ``KILL_AT_STEP`` makes a trainer end as by kill -9 once it has made so many
steps, in the middle of the next one's backward pass. ``LEAVE_CHILD`` makes it fork a child
that outlives it.
"""

import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

from fleet.parameter_server import fleet


class Numbers(Dataset[torch.Tensor]):
    """Rows of numbers, made by whoever asks."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(100, generator=torch.Generator().manual_seed(index))


def main(steps: int) -> None:
    """Train, or serve."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fleet.init()
    first = torch.nn.Linear(100, 200)
    model = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(200, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.001), model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    print("joined at step", fleet.step, flush=True)
    if "LEAVE_CHILD" in os.environ and os.fork() == 0:
        time.sleep(300)
        os._exit(0)

    def kill(_: torch.Tensor) -> None:
        if fleet.step == int(os.environ.get("KILL_AT_STEP", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)

    # The last layer's gradients have been sent by now, the first layer's have not.
    first.weight.register_hook(kill)
    loader = DataLoader(Numbers(), batch_size=16, num_workers=2)
    while fleet.step < steps:
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            print("made step", fleet.step, flush=True)
            if fleet.step == steps:
                break
    fleet.stop_worker()


if __name__ == "__main__":
    main(int(sys.argv[1]))
