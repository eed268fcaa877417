"""Handwritten digits by a job whose trainers come and go.

Arguments: a file. Each trainer trains on its third of the data, stays in the job until the file is there, and
says then what share of the test set its model gets right.
"""

import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from fleet.parameter_server import fleet

TEST, BATCH, SHARES, EPOCHS = 360, 32, 3, 60


def main(enough: Path) -> None:
    """Train, or serve."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fleet.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 10))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    print("joined at step", fleet.step, "one of", fleet.worker_num(), flush=True)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images, labels = (
        torch.tensor(digits.data, dtype=torch.float32)[order] / 16,
        torch.tensor(digits.target)[order],
    )
    mine = torch.arange(TEST, len(labels))[fleet.worker_index() :: SHARES]
    for _ in range(EPOCHS):
        for chosen in mine[torch.randperm(len(mine))].split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    print("has trained", flush=True)
    while not enough.exists():
        time.sleep(0.1)
    fleet.stop_worker()
    with torch.no_grad():
        right = (model(images[:TEST]).argmax(1) == labels[:TEST]).float().mean()
    print("accuracy", float(right), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
