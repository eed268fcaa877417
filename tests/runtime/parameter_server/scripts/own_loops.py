"""Loops that do something to gradients or weights, as they are written for one process.

Arguments: the folder for results. One after the other they are trained by a fleet and servers of their own,
at the ports that follow, with the default strategy.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fleet import role_maker
from fleet.parameter_server import Fleet

STEPS, TRAINERS = 8, 2
INFINITE = {(1, 0), (5, 1)}
"""Steps and trainers whose loss is infinite."""

Loss = Callable[[int], torch.Tensor]
Loop = Callable[[Any, Any, Loss, Fleet], None]


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build the model, alike everywhere."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Tanh(), torch.nn.Linear(200, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_of(model: torch.nn.Module, step: int, trainer: int) -> torch.Tensor:
    """Return the loss of one trainer's batch."""
    x = torch.randn(16, 100, generator=torch.Generator().manual_seed(1000 * step + trainer))
    loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss


def scaled(model: Any, optimizer: Any, loss: Loss, fleet: Fleet) -> None:
    """Scale losses; where a step is skipped, so is the scheduler's, as many scripts have it."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss(step)).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()


def scaled_and_clipped(model: Any, optimizer: Any, loss: Loss, fleet: Fleet) -> None:
    """Scale losses, and clip gradients in between."""
    scaler = torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss(step)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def accumulated(model: Any, optimizer: Any, loss: Loss, fleet: Fleet) -> None:
    """Step after every second backward pass."""
    for step in range(STEPS):
        (loss(step) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def clamped(model: Any, optimizer: Any, loss: Loss, fleet: Fleet) -> None:
    """Clamp each gradient as PyTorch's tutorial of deep Q-learning does: no version counter moves."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(step).backward()
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-0.01, 0.01)
        optimizer.step()


def written(model: Any, optimizer: Any, loss: Loss, fleet: Fleet) -> None:
    """Begin with other weights, and clamp them after each step, as Wasserstein GANs do."""
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    fleet.push_parameters()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.03, 0.03)
        fleet.push_parameters()


def in_turn(model: Any, optimizer: Any, loss: Loss, fleet: Fleet) -> None:
    """Step two parts of a model in turn, as a GAN's discriminator and generator, by one optimizer."""
    first, second = model[0], model[2]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(step).backward()
        (second if step % 2 else first).zero_grad()
        optimizer.step()


def ascents(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return where a sharpness-aware step looks from; the first rows of the first layer stay as they are."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    found = [0.05 * grad / norm for grad in grads]
    found[0][:3] = 0.0
    return found


def sharpness_aware(model: Any, optimizer: Any, loss: Loss, fleet: Fleet) -> None:
    """Take the gradient a little uphill, and come back by subtracting: but for rounding."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(step).backward()
        uphill = ascents(model)
        with torch.no_grad():
            for parameter, each in zip(model.parameters(), uphill, strict=True):
                parameter.add_(each)
        optimizer.zero_grad()
        loss(step).backward()
        with torch.no_grad():
            for parameter, each in zip(model.parameters(), uphill, strict=True):
                parameter.sub_(each)
        optimizer.step()


LOOPS: dict[str, Loop] = {
    each.__name__: each
    for each in (scaled, scaled_and_clipped, accumulated, clamped, written, in_turn, sharpness_aware)
}


def train(loop: str, endpoints: list[str]) -> dict[str, torch.Tensor]:
    """Train as one replica of a job."""
    is_server = os.environ["TRAINING_ROLE"] == "PSERVER"
    own = int(os.environ["SERVER_INDEX"] if is_server else os.environ["PADDLE_TRAINER_ID"])
    kind = role_maker.Role.SERVER if is_server else role_maker.Role.WORKER
    fleet = Fleet()
    fleet.init(role_maker.UserDefinedRoleMaker(own, kind, TRAINERS, endpoints))
    model, wrapped = build()
    optimizer = fleet.distributed_optimizer(wrapped, model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return {}
    fleet.init_worker()

    def loss(step: int) -> torch.Tensor:
        factor = float("inf") if loop == "scaled" and (step, own) in INFINITE else 1.0
        return loss_of(model, step, own) * factor

    LOOPS[loop](model, optimizer, loss, fleet)
    fleet.stop_worker()
    return {name: value.clone() for name, value in model.state_dict().items()}


def main(results: Path) -> None:
    """Train each loop; trainers write what they end with."""
    torch.set_num_threads(1)
    listed = [endpoint.split(":") for endpoint in os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")]
    for position, loop in enumerate(LOOPS):
        endpoints = [f"{host}:{int(port) + position * len(listed)}" for host, port in listed]
        trained = train(loop, endpoints)
        if trained:
            torch.save(trained, results / f"{loop}-{os.environ['PADDLE_TRAINER_ID']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
