"""Runs the same training with trainers and servers in this process, and with a single model.

The single model computes the expected result of a job: gradients are summed in trainer order, divided by the
number of trainers and clipped, before one step of the optimizer.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fleet.parameter_server.trainer.optimizer import DistributedOptimizer
from tests.support.parameter_server import Loopback, loopback
from tests.support.threads import one_torch_thread

NoSync = Callable[[], AbstractContextManager[None]]
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Training:
    """The model, data and options of a training run.

    Attributes
    ----------
    model : callable
        Returns a model that is initialized identically in every call.
    optimizer : callable
        Returns an optimizer of the result of `groups`.
    backward : callable
        Called as ``backward(model, step, trainer, no_sync)``; computes a trainer's gradients of a step.
    groups : callable
        Returns a model's parameters or param groups.
    scheduler : callable, optional
        Returns a scheduler of an optimizer.
    metrics : tuple of float
        The argument of the scheduler's ``step`` in each step; empty if it takes none.
    steps : tuple of int
        The number of steps of each trainer.
    """

    model: Callable[[], torch.nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    backward: Callable[[Any, int, int, NoSync], None]
    groups: Callable[[Any], Any] = lambda model: model.parameters()
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    metrics: tuple[float, ...] = ()
    steps: tuple[int, ...] = (4, 4)

    def advance(self, scheduler: Any, step: int) -> None:
        """Advance the learning-rate scheduler, if any."""
        if scheduler is not None:
            scheduler.step(*self.metrics[step : step + 1])


def values_of(model: torch.nn.Module) -> Values:
    """Return copies of a model's parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_alone(training: Training, clip: Callable[[torch.nn.Module], Any] | None = None) -> Values:
    """Train one model without servers."""
    model = training.model()
    optimizer = training.optimizer(training.groups(model))
    scheduler = training.scheduler(optimizer) if training.scheduler is not None else None
    for step in range(max(training.steps)):
        of_trainers = []
        for trainer in (index for index, steps in enumerate(training.steps) if step < steps):
            optimizer.zero_grad()
            training.backward(model, step, trainer, nullcontext)
            of_trainers.append([parameter.grad for parameter in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *of_trainers, strict=True):
            present = [gradient for gradient in gradients if gradient is not None]
            parameter.grad = None
            if present:
                total = present[0].clone()
                for gradient in present[1:]:
                    total += gradient
                parameter.grad = total * (1.0 / len(of_trainers)) if len(of_trainers) > 1 else total
        if clip is not None:
            clip(model)
        optimizer.step()
        training.advance(scheduler, step)
    return values_of(model)


def train_together(
    training: Training, servers: int = 2, *, cross_step: bool = False, **arguments: Any
) -> list[Values]:
    """Train with parameter servers, and with one trainer for each entry of ``training.steps``.

    Returns
    -------
    list of mapping
        The final parameters of each trainer's model.
    """
    with (
        one_torch_thread(),
        loopback(
            servers=servers,
            trainers=len(training.steps),
            optimizer=training.optimizer,
            model=training.model,
            groups=training.groups,
            **arguments,
        ) as job,
    ):
        return _run(job, training, cross_step=cross_step)


def _run(job: Loopback, training: Training, *, cross_step: bool) -> list[Values]:
    ended: dict[int, Values] = {}
    errors: list[BaseException] = []
    # Not in the threads: concurrent captures may deadlock in torch, on a generator's lock and the GIL.
    made = [job.make_trainer(index, cross_step=cross_step) for index in range(len(training.steps))]

    def train(index: int) -> None:
        try:
            trainer, model, wrapped = made[index]
            optimizer = DistributedOptimizer(wrapped, never_minimized)
            trainer.start()
            optimizer.bind(trainer)
            scheduler = training.scheduler(optimizer) if training.scheduler is not None else None
            for step in range(training.steps[index]):
                optimizer.zero_grad()
                training.backward(model, step, index, optimizer.no_sync)
                optimizer.step()
                training.advance(scheduler, step)
            trainer.complete()
            ended[index] = values_of(model)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            errors.append(error)
            for other in job.trainers:
                other.close()

    threads = [threading.Thread(target=train, args=(i,), daemon=True) for i in range(len(training.steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a trainer still trains"
    if errors:
        raise errors[0]
    for running in job.servers:
        running.join()
        assert running.failure is None
    return [ended[index] for index in sorted(ended)]


def never_minimized(loss_fn: Callable[..., Any]) -> None:
    """Stand in for ``minimize``, which these loops never call."""
    raise AssertionError("minimize was called")


def assert_same_bits(found: Values, expected: Values) -> None:
    """Check that two models' parameters are bitwise identical; the failure names those that differ."""
    assert found.keys() == expected.keys()
    differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not differing, f"other bits in {', '.join(differing)}"
