"""Training runs in this process for checkpoint tests: a small model, and one batch per step."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from fleet.checkpoint import TrainStatus
from fleet.parameter_server.trainer.trainer import Trainer
from tests.support.parameter_server import loopback, small_model

BATCHES = torch.linspace(-1, 1, 20 * 3 * 20).reshape(20, 3, 20)

OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.001, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1),
}


def loss_of(model: Any, batch: torch.Tensor) -> Any:
    """Return the loss of the model on a batch."""
    return model(batch).square().mean()


def train(trainer: Trainer, model: Any, steps: range) -> None:
    """Train for the given steps, each on its own batch."""
    for step in steps:
        model.zero_grad()
        loss_of(model, BATCHES[step]).backward()
        trainer.step()


def alone(optimizer_of: Any, steps: int) -> dict[str, torch.Tensor]:
    """Return the model's state after single-process training for a number of steps."""
    model = small_model()
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, BATCHES[step]).backward()
        optimizer.step()
    assert all(value.isfinite().all() for value in model.state_dict().values())
    return dict(model.state_dict())


def differing(model: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the values that differ in any bit."""
    return [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])]


def saved(directory: Path, steps: int, servers: int = 2, **arguments: Any) -> None:
    """Train a separate job for some steps, and save a checkpoint in a directory."""
    with loopback(servers=servers, **arguments) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        train(trainer, model, range(steps))
        trainer.save(str(directory), TrainStatus())
        trainer.complete()


def flip_a_bit(path: Path) -> str:
    """Flip one bit of a file, as a bad disk does; return the file's new SHA-256 digest."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()
