"""Weights that a script writes between steps: pushed to the servers, in every mode; otherwise named."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fleet.errors import ConfigurationError, DeadlineExceededError, FleetError
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer.trainer import Trainer
from fleet.plan import DistributeTranspilerConfig
from tests.runtime.parameter_server.elastic_averaging import ElasticAveraging
from tests.support.parameter_server import loopback
from tests.support.threads import at_once, one_torch_thread

pytestmark = pytest.mark.usefixtures("each_transport")

CONFIGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"sync_mode": False, "runtime_split_send_recv": True},
    "half-async": {"sync_mode": False},
    "geo": {"sync_mode": False, "geo_sgd_mode": True, "geo_sgd_need_push_nums": 2},
}


def config(name: str) -> DistributeTranspilerConfig:
    return DistributeTranspilerConfig(**CONFIGS[name])


def backward(model: Any) -> None:
    model.zero_grad()
    model(torch.linspace(-1, 1, 60).reshape(3, 20)).square().mean().backward()


def make_step(trainer: Trainer, model: Any) -> None:
    backward(model)
    trainer.step()


def fill(model: Any, value: float) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(value)


@contextmanager
def joined(trainers: int = 1, *, cross_step: bool = False, **arguments: Any) -> Iterator[list[Any]]:
    """Give trainers that have joined two servers, each with its model."""
    with one_torch_thread(), loopback(servers=2, trainers=trainers, **arguments) as job:
        made = [job.make_trainer(index, cross_step=cross_step)[:2] for index in range(trainers)]
        at_once(*(trainer.start for trainer, _ in made))
        yield made


def step_alone(model: Any) -> dict[str, torch.Tensor]:
    """Return what one step makes of a model's weights in one process."""
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    backward(alone)
    optimizer.step()
    return dict(alone.named_parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_training_goes_on_from_what_was_written(name):
    with joined(config=config(name)) as [(trainer, model)]:
        for _ in range(4):
            make_step(trainer, model)
        fill(model, 0.01)
        expected = step_alone(model)
        trainer.push()
        make_step(trainer, model)
        trainer.complete()
        assert trainer.current_step == 5
    for parameter, value in expected.items():
        torch.testing.assert_close(model.get_parameter(parameter), value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "geo"])
def test_one_number_that_is_written_late_and_not_pushed_is_an_error(name):
    with joined(config=config(name)) as [(trainer, model)]:
        for _ in range(9):
            make_step(trainer, model)
        model[0].weight.data[17, 2] = 5.0
        backward(model)
        with pytest.raises(FleetError, match=r"0\.weight was written to .*fleet\.push_parameters\(\)"):
            trainer.step()


def test_in_sync_mode_the_first_trainers_values_are_everybodys_and_a_difference_is_said(caplog):
    with joined(trainers=2) as made:
        (zero, model_zero), (one, model_one) = made
        at_once(*(lambda each=each: make_step(*each) for each in made))
        fill(model_zero, 0.01)
        fill(model_one, 0.02)
        model_one[0].weight.data.fill_(0.01)
        at_once(zero.push, one.push)
        assert "trainers have written different values to 0.bias, 2.bias, 2.weight …" in caplog.text
        assert "all trainers now have the values of trainer 0" in caplog.text
        assert all((parameter == 0.01).all() for parameter in model_one.parameters())
        caplog.clear()
        fill(model_zero, 0.03)
        fill(model_one, 0.03)
        at_once(zero.push, one.push)
        assert caplog.text == ""
        expected = step_alone(model_zero)
        at_once(*(lambda each=each: make_step(*each) for each in made))
        for _, model in made:
            for name, value in expected.items():
                assert torch.equal(model.get_parameter(name), value), name


def test_a_trainer_that_has_completed_is_not_asked():
    with joined(trainers=2) as [(zero, _), (one, model)]:
        zero.complete()
        fill(model, 0.01)
        expected = step_alone(model)
        one.push()
        make_step(one, model)
        assert torch.equal(model[0].weight, expected["0.weight"])


def test_a_trainer_that_does_not_push_is_named(monkeypatch):
    with joined(trainers=2) as [(zero, _), _]:
        monkeypatch.setattr(
            Settings, "stalled_seconds", property(lambda _: 0.5)
        )  # not before all have joined
        with pytest.raises(
            DeadlineExceededError, match=r"fleet\.push_parameters .* waited \d s for trainer 1"
        ):
            zero.push()


@pytest.mark.parametrize("name", ["async", "half-async"])
def test_in_the_other_modes_the_last_to_push_counts(name):
    with joined(trainers=2, config=config(name)) as [(zero, model_zero), (one, model_one)]:
        fill(model_one, 0.02)
        one.push()
        fill(model_zero, 0.01)
        zero.push()
        assert torch.equal(one.export()["0.weight"], torch.full((1000, 20), 0.01))
        one.complete()
        zero.complete()


@pytest.mark.parametrize(("name", "stays"), [("sync", True), ("async", True), ("half-async", False)])
def test_what_is_written_before_the_end_stays_or_is_named(name, stays):
    with joined(config=config(name)) as [(trainer, model)]:
        for _ in range(4):
            make_step(trainer, model)
        fill(model, 0.5)
        if stays:
            trainer.complete()
            assert all((parameter == 0.5).all() for parameter in model.parameters())
        else:
            with pytest.raises(FleetError, match=r"was written to .*after fleet\.stop_worker\(\)"):
                trainer.complete()


def test_gradients_that_have_left_are_named():
    with joined() as [(trainer, model)]:
        backward(model)
        with pytest.raises(FleetError, match=r"push_parameters\(\) was called, but the gradients"):
            trainer.push()


def test_a_mode_of_the_scripts_own_is_refused_by_name():
    mode = ElasticAveraging(period=4, alpha=0.5)
    with (
        joined(mode=mode) as [(trainer, _)],
        pytest.raises(ConfigurationError, match=r"push_parameters\(\) .* mode 'elastic.averaging'"),
    ):
        trainer.push()


def test_what_is_written_while_values_are_under_way_is_noticed_when_they_are_adopted():
    with joined(cross_step=True) as [(trainer, model)]:
        for _ in range(4):
            make_step(trainer, model)
        model[0].weight.data.clamp_(-1e-3, 1e-3)
        with pytest.raises(FleetError, match=r"still in transit.*state_dict\(\)"):
            trainer.push()
        with pytest.raises(FleetError, match=r"parameter 0\.weight was written to .*push_parameters\(\)"):
            backward(model)


def test_what_is_written_after_the_last_values_are_here_is_pushed_across_steps_too():
    with joined(cross_step=True) as [(trainer, model)]:
        make_step(trainer, model)
        model.state_dict()
        fill(model, 0.01)
        expected = step_alone(model)
        trainer.push()
        make_step(trainer, model)
        trainer.complete()
        assert torch.equal(model[0].weight, expected["0.weight"])
