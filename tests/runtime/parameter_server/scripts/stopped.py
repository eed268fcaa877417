"""Train until told to: by SIGTERM, which ends this trainer's loop, or by a file, which ends everybody's.

Arguments: the folder for results, in which the file is ``enough``.
"""

import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

from fleet.parameter_server import fleet


def main() -> None:
    """Train, and save."""
    folder = Path(sys.argv[1])
    told = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        told.set()

    signal.signal(signal.SIGTERM, stop)
    fleet.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    print("trains", flush=True)
    while not told.is_set() and not (folder / "enough").exists():
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    fleet.stop_worker()
    torch.save(model.state_dict(), folder / f"model-{fleet.worker_index()}.pt")
    print("saved", flush=True)


if __name__ == "__main__":
    main()
