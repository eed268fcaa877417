"""Loops written for one process, which change gradients or weights: they train as they do there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.parameter_server.scripts import own_loops
from tests.support.replicas import job
from tests.support.threads import one_torch_thread

SCRIPT = Path(own_loops.__file__)

Values = dict[str, torch.Tensor]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Values]]:
    directory = tmp_path_factory.mktemp("own-loops")
    with job(directory, servers=2, trainers=2, rounds=len(own_loops.LOOPS)) as running:
        servers = [
            running.server(index, SCRIPT, str(directory), SERVER_INDEX=str(index)) for index in range(2)
        ]
        trainers = [running.trainer(index, SCRIPT, str(directory)) for index in range(2)]
        for replica in (*trainers, *servers):
            replica.expect(0, seconds=240)
    return {
        loop: [torch.load(directory / f"{loop}-{index}.pt") for index in range(2)] for loop in own_loops.LOOPS
    }


def set_mean(model: torch.nn.Module, backward: Callable[[int], Any]) -> None:
    """Leave the mean over the trainers of the gradients that `backward` leaves for each."""
    of_trainers = []
    for trainer in range(own_loops.TRAINERS):
        model.zero_grad()
        backward(trainer)
        of_trainers.append([parameter.grad for parameter in model.parameters()])
    for parameter, first, second in zip(model.parameters(), *of_trainers, strict=True):
        assert first is not None
        assert second is not None
        parameter.grad = (first + second) * 0.5


def scaled(model: Any, optimizer: Any) -> None:
    """Scale the loss of both halves of the batch, of which one may be infinite, by one scaler."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    skipped = 0
    for step in range(own_loops.STEPS):

        def backward(trainer: int, step: int = step) -> None:
            factor = float("inf") if (step, trainer) in own_loops.INFINITE else 1.0
            scaler.scale(own_loops.loss_of(model, step, trainer) * factor).backward()

        set_mean(model, backward)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
        else:
            skipped += 1
    assert skipped == len(own_loops.INFINITE)


def scaled_and_clipped(model: Any, optimizer: Any) -> None:
    """Leave the scale out: a power of two changes no bit."""
    for step in range(own_loops.STEPS):

        def backward(trainer: int, step: int = step) -> None:
            own_loops.loss_of(model, step, trainer).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

        set_mean(model, backward)
        optimizer.step()


def accumulated(model: Any, optimizer: Any) -> None:
    """Add up two backward passes of each half."""
    for step in range(0, own_loops.STEPS, 2):

        def backward(trainer: int, step: int = step) -> None:
            (own_loops.loss_of(model, step, trainer) / 2).backward()
            (own_loops.loss_of(model, step + 1, trainer) / 2).backward()

        set_mean(model, backward)
        optimizer.step()


def clamped(model: Any, optimizer: Any) -> None:
    """Clamp the gradients of each half."""
    for step in range(own_loops.STEPS):

        def backward(trainer: int, step: int = step) -> None:
            own_loops.loss_of(model, step, trainer).backward()
            for parameter in model.parameters():
                parameter.grad.clamp_(-0.01, 0.01)

        set_mean(model, backward)
        optimizer.step()


def written(model: Any, optimizer: Any) -> None:
    """Begin with halved weights, and clamp them after each step."""
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    for step in range(own_loops.STEPS):

        def backward(trainer: int, step: int = step) -> None:
            own_loops.loss_of(model, step, trainer).backward()

        set_mean(model, backward)
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.03, 0.03)


def in_turn(model: Any, optimizer: Any) -> None:
    """Step the two layers in turn, each by an optimizer of its own."""
    del optimizer
    of_layer = [torch.optim.Adam(model[layer].parameters(), lr=0.01) for layer in (0, 2)]
    for step in range(own_loops.STEPS):

        def backward(trainer: int, step: int = step) -> None:
            own_loops.loss_of(model, step, trainer).backward()

        set_mean(model, backward)
        of_layer[0 if step % 2 else 1].step()


def sharpness_aware(model: Any, optimizer: Any) -> None:
    """Take the gradient of each half a little uphill of the weights that both share."""
    for step in range(own_loops.STEPS):

        def backward(trainer: int, step: int = step) -> None:
            own_loops.loss_of(model, step, trainer).backward()
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            uphill = own_loops.ascents(model)
            with torch.no_grad():
                for parameter, each in zip(model.parameters(), uphill, strict=True):
                    parameter.add_(each)
            model.zero_grad()
            own_loops.loss_of(model, step, trainer).backward()
            model.load_state_dict(kept)

        set_mean(model, backward)
        optimizer.step()


@pytest.mark.parametrize(
    "alone", [scaled, scaled_and_clipped, accumulated, clamped, written, in_turn, sharpness_aware]
)
def test_a_loop_trains_as_in_one_process(trained, alone):
    with one_torch_thread():
        model, optimizer = own_loops.build()
        alone(model, optimizer)
    for values in trained[alone.__name__]:
        differing = [
            name for name, value in model.state_dict().items() if not torch.equal(values[name], value)
        ]
        assert differing == []
