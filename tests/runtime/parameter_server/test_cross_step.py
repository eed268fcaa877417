"""Values that are awaited layer by layer in the next forward pass: the same training, to the bit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.modes import AnsweredTrainer, Async, Session
from fleet.parameter_server.trainer.optimizer import DistributedOptimizer
from fleet.parameter_server.trainer.trainer import Trainer
from fleet.plan import DistributeTranspilerConfig, PlannedBlock
from tests.support.parameter_server import loopback
from tests.support.training import (
    NoSync,
    Training,
    assert_same_bits,
    never_minimized,
    train_alone,
    train_together,
    values_of,
)

pytestmark = pytest.mark.usefixtures("each_transport")

ROWS, COLUMNS = 600, 30  # 18000 elements: cut in two at two servers


class Layers(nn.Module):
    """Three layers, one of which a forward pass may pass over."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(ROWS, COLUMNS)
        self.middle = nn.Linear(COLUMNS, COLUMNS)
        self.last = nn.Linear(COLUMNS, 1)

    def forward(self, x: torch.Tensor, *, passes_over: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if not passes_over:
            hidden = torch.tanh(self.middle(hidden))
        return torch.as_tensor(self.last(hidden))


def numbers(step: int, trainer: int) -> torch.Tensor:
    return torch.randn(8, ROWS, generator=torch.Generator().manual_seed(100 * step + trainer))


def backward(model: Any, step: int, trainer: int, no_sync: NoSync) -> None:
    (model(numbers(step, trainer), passes_over=step == 1) - 1.0).square().mean().backward()


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=0.01)


@contextmanager
def joined(**arguments: Any) -> Iterator[tuple[Trainer, Any, DistributedOptimizer]]:
    """Give a trainer that has joined its servers, its model and the optimizer that its loop holds."""
    with loopback(model=Layers, optimizer=adam, **arguments) as job:
        trainer, model, wrapped = job.make_trainer(cross_step=True)
        optimizer = DistributedOptimizer(wrapped, never_minimized)
        trainer.start()
        optimizer.bind(trainer)
        yield trainer, model, optimizer


def test_two_trainers_that_wait_in_the_forward_pass_train_as_one_process_does():
    """In one of the steps nobody uses a layer: it waits for its values elsewhere, and is not stepped."""
    training = Training(Layers, adam, backward, steps=(5, 4))
    alone = train_alone(training)
    first, second = train_together(training, cross_step=True)
    assert_same_bits(first, alone)
    assert set(second) == set(alone)


def test_an_asynchronous_trainer_waits_in_the_forward_pass_too():
    training = Training(Layers, adam, backward, steps=(4,))
    config = DistributeTranspilerConfig()
    config.sync_mode = False
    config.runtime_split_send_recv = True
    (ended,) = train_together(training, cross_step=True, config=config)
    assert_same_bits(ended, train_alone(training))


def test_a_layer_has_its_new_values_when_it_runs_and_a_state_dict_when_it_is_read():
    with joined() as (trainer, model, optimizer):
        before = values_of(model)
        backward(model, 0, 0, nullcontext)
        optimizer.step()
        assert_same_bits(values_of(model), before)
        hidden = model.first(numbers(1, 0))
        assert not torch.equal(model.first.weight, before["first.weight"])
        assert torch.equal(hidden, nn.functional.linear(numbers(1, 0), model.first.weight, model.first.bias))
        assert torch.equal(model.last.weight, before["last.weight"])
        read = model.state_dict()
        assert not torch.equal(read["last.weight"], before["last.weight"])
        assert_same_bits(values_of(model), {name: value.clone() for name, value in read.items()})
        trainer.complete()


def test_a_parameter_that_is_used_without_its_module_is_an_error_that_names_it():
    with joined() as (_, model, optimizer):
        backward(model, 0, 0, nullcontext)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(
            FleetError, match=r"first\.weight has a gradient, but the module that owns it has run no forward"
        ):
            nn.functional.linear(numbers(1, 0), model.first.weight).sum().backward()


@pytest.mark.parametrize("then", ["step", "end"])
def test_a_gradient_that_is_zeroed_while_it_may_be_under_way_is_an_error_that_names_it(then):
    """Over TCP the gradient's own memory waits to be sent, though step() has returned."""
    with joined() as (trainer, model, optimizer):
        backward(model, 0, 0, nullcontext)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        go_on = {"step": lambda: backward(model, 1, 0, nullcontext), "end": trainer.complete}[then]
        with pytest.raises(FleetError, match=r"was changed in place after optimizer\.step\(\)"):
            go_on()


def test_an_optimizers_state_is_that_after_the_last_step():
    with joined(servers=2) as (trainer, model, optimizer):
        for step in range(3):
            optimizer.zero_grad()
            backward(model, 0, 0, nullcontext)
            optimizer.step()
            state = optimizer.state_dict()["state"]
            assert {float(entries["step"]) for entries in state.values()} == {step + 1.0}
        trainer.complete()


def test_a_mode_that_does_not_wait_cannot_wait_later():
    config = DistributeTranspilerConfig()
    config.sync_mode = False
    config.half_async = True
    with (
        loopback(model=Layers, optimizer=adam, config=config) as job,
        pytest.raises(ConfigurationError, match=r"cross_step is True, but in the mode 'half_async'"),
    ):
        job.make_trainer(cross_step=True)[0].start()


def test_a_half_with_steps_of_its_own_is_not_replaced():
    class Counting(AnsweredTrainer):
        def finish(self, absent: Sequence[PlannedBlock]) -> None:
            super().finish(absent)

    class CountingMode(Async):
        def make_trainer(self, session: Session) -> AnsweredTrainer:
            return Counting(session)

    with (
        loopback(model=Layers, optimizer=adam, mode=CountingMode()) as job,
        pytest.raises(ConfigurationError, match=r"cross_step is True, but in the mode 'async'"),
    ):
        job.make_trainer(cross_step=True)[0].start()
