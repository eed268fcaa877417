"""Train a small network: the quick start."""

import argparse

import torch
from torch import nn

from fleet.parameter_server import fleet

BATCH = 128


def generate(step: int, trainer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 128 points in 32 dimensions, and whether their first half weighs more than the second."""
    x = torch.rand(BATCH, 32, generator=torch.Generator().manual_seed(1000 * step + trainer))
    return x, (x[:, :16].sum(1) > x[:, 16:].sum(1)).long()


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1001)
    options = parser.parse_args()

    fleet.init()
    torch.manual_seed(0)
    model = build_model()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    if fleet.is_server():
        return fleet.run_server()
    fleet.init_worker()
    for step in fleet.steps(range(1, options.steps + 1)):
        x, y = generate(step, fleet.worker_index())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 100 == 1:
            fleet.report(step=step, total_steps=options.steps, loss=loss.item(), samples=step * BATCH)
    fleet.stop_worker()
    x, y = generate(0)
    print(f"loss on other points: {nn.functional.cross_entropy(model(x), y).item():.4f}")


if __name__ == "__main__":
    main()
