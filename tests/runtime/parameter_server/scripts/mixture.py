"""A loop with everything that can differ from step to step; the servers' result and one process's agree.

Arguments: the folder for results. Trained twice with overlap, then without, each time by a fleet and
servers of its own at the ports that follow.

The model has a branch that trainer 0 uses more often than trainer 1 (absent gradients on some trainers), one
that nobody uses in some steps (absent on all), two param groups, a scheduler, and steps made of two backward
passes.
"""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.optim.lr_scheduler import StepLR

from fleet import role_maker
from fleet.parameter_server import Fleet
from fleet.strategy import DistributedStrategy

STEPS, TRAINERS = 12, 2
ROUNDS = ("overlap", "again", "no-overlap")


class Branches(torch.nn.Module):
    """A trunk, and two branches that are not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(100, 300)
        self.sometimes = torch.nn.Linear(300, 300)
        self.rarely = torch.nn.Linear(300, 300)
        self.head = torch.nn.Linear(300, 1)

    def forward(self, x: torch.Tensor, step: int, trainer: int) -> torch.Tensor:
        """Predict, by the way that this trainer takes at this step."""
        h = torch.tanh(self.trunk(x))
        if step % 3 != 2 and not (trainer == 1 and step % 3 == 1):
            h = h + torch.tanh(self.sometimes(h))
        if step % 4 == 0:
            h = h + torch.tanh(self.rarely(h))
        predicted: torch.Tensor = self.head(h)
        return predicted


def build() -> tuple[Branches, torch.optim.Optimizer, StepLR]:
    """Build the model, alike everywhere."""
    torch.manual_seed(1)
    model = Branches()
    groups = [
        {"params": [*model.trunk.parameters(), *model.head.parameters()], "weight_decay": 0.01},
        {"params": [*model.sometimes.parameters(), *model.rarely.parameters()], "lr": 0.003},
    ]
    optimizer = torch.optim.Adam(groups, lr=0.01, amsgrad=True)
    return model, optimizer, StepLR(optimizer, step_size=3, gamma=0.7)


def accumulate(
    model: Branches,
    step: int,
    trainer: int,
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Run the backward passes of one trainer's step."""
    generator = torch.Generator().manual_seed(1000 * step + trainer)
    passes = 2 if step % 5 == 3 else 1
    for number in range(passes):
        x, y = torch.randn(16, 100, generator=generator), torch.randn(16, 1, generator=generator)
        with no_sync() if number + 1 < passes else nullcontext():
            torch.nn.functional.mse_loss(model(x, step, trainer), y).backward()


def in_one_process() -> dict[str, torch.Tensor]:
    """Do the same mathematics with one model: gradients summed in trainer order, scaled, one step."""
    model, optimizer, scheduler = build()
    for step in range(STEPS):
        of_trainers = []
        for trainer in range(TRAINERS):
            optimizer.zero_grad()
            accumulate(model, step, trainer)
            of_trainers.append([parameter.grad for parameter in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *of_trainers, strict=True):
            present = [gradient for gradient in gradients if gradient is not None]
            parameter.grad = None
            if present:
                total = present[0].clone()
                for gradient in present[1:]:
                    total += gradient
                parameter.grad = total * (1.0 / TRAINERS)
        optimizer.step()
        scheduler.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(endpoints: list[str], overlap: bool) -> dict[str, torch.Tensor]:
    """Train as one replica of a job."""
    is_server = os.environ["TRAINING_ROLE"] == "PSERVER"
    own = int(os.environ["SERVER_INDEX"] if is_server else os.environ["PADDLE_TRAINER_ID"])
    kind = role_maker.Role.SERVER if is_server else role_maker.Role.WORKER
    fleet = Fleet()
    fleet.init(role_maker.UserDefinedRoleMaker(own, kind, TRAINERS, endpoints))
    model, wrapped, scheduler = build()
    optimizer = fleet.distributed_optimizer(wrapped, DistributedStrategy(overlap=overlap), model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return {}
    fleet.init_worker()
    for step in range(STEPS):
        optimizer.zero_grad()
        accumulate(model, step, fleet.worker_index(), optimizer.no_sync)
        optimizer.step()
        scheduler.step()
    state = optimizer.state_dict()
    fleet.barrier_worker()
    fleet.stop_worker()
    # One process's Adam takes the fetched state as its own.
    wrapped.load_state_dict(state)
    return {name: value.clone() for name, value in model.state_dict().items()}


def main(results: Path) -> None:
    """Train in every round; trainers write what they end with."""
    torch.set_num_threads(1)
    listed = [endpoint.split(":") for endpoint in os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")]
    for position, name in enumerate(ROUNDS):
        endpoints = [f"{host}:{int(port) + position * len(listed)}" for host, port in listed]
        trained = train(endpoints, overlap=name != "no-overlap")
        if trained:
            torch.save(trained, results / f"{name}-{os.environ['PADDLE_TRAINER_ID']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
