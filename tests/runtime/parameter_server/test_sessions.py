"""Sessions of trainers with servers, in one process over loopback: who may join, and what a step does."""

import contextlib
import itertools
import logging
import re
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from fleet.errors import ConfigurationError, FleetError, PeerLostError, StateLostError
from fleet.parameter_server import waits
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.modes import Async, ImmediateServer
from fleet.parameter_server.server.server import Server
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer.trainer import Trainer
from fleet.plan import DistributeTranspilerConfig
from tests.support.parameter_server import QUICK, Loopback, loopback, sgd, small_model
from tests.support.processes import wait_for
from tests.support.threads import at_once

X = torch.linspace(-1, 1, 60).reshape(3, 20)


def loss_of(model: Any, x: torch.Tensor = X) -> Any:
    return model(x).square().mean()


def stop_beating(trainer: Trainer) -> None:
    """Let a trainer fall silent, though its connections stand."""
    heartbeat = trainer.session._heartbeat
    assert heartbeat is not None
    heartbeat.stop()


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_one_trainer_steps_as_torch_does():
    with loopback(servers=2) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        alone = small_model()
        optimizer = sgd(alone.parameters())
        for _ in range(3):
            model.zero_grad()
            loss_of(model).backward()
            trainer.step()
            optimizer.zero_grad()
            loss_of(alone).backward()
            optimizer.step()
        assert trainer.current_step == 3
        trainer.complete()
        for name, value in values(alone).items():
            assert torch.equal(values(model)[name], value), name
        for running in job.servers:
            running.join()
            assert running.failure is None


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_who_sends_lives_though_no_beat_gets_through(transport, monkeypatch):
    """Of a process that computes with all its might, what it computes may be all that arrives, either way."""
    released, heartbeat = threading.Event(), Server.heartbeat

    def starved(server: Server, trainer: int, attempt: int) -> control_pb2.HeartbeatReply:
        released.wait(20.0)
        return heartbeat(server, trainer, attempt)

    monkeypatch.setattr(Server, "heartbeat", starved)
    settings = Settings(heartbeat_seconds=0.05, deadline_seconds=1.0, transport=transport)
    with loopback(settings=settings) as job, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(released.set)
        trainer, model, _ = job.make_trainer()
        trainer.start()
        until = time.monotonic() + 5.0  # either would give the other up after a second and a quarter
        while time.monotonic() < until:
            model.zero_grad()
            loss_of(model).backward()
            trainer.step()
        assert job.servers[0].failure is None
        released.set()
        trainer.complete()
        job.servers[0].join()
        assert job.servers[0].failure is None


def test_the_servers_values_win_and_one_warning_says_so(caplog):
    def other_model() -> Any:
        model = small_model()
        with torch.no_grad():
            model[0].weight.add_(1.0)
        return model

    with loopback(servers=2) as job, caplog.at_level(logging.WARNING):
        trainer, model, _ = job.make_trainer(model=other_model)
        trainer.start()
        assert torch.equal(model[0].weight, small_model()[0].weight)
    warnings = [record.getMessage() for record in caplog.records if "the initial values of" in record.message]
    assert len(warnings) == 1
    assert "trainer 0" in warnings[0]
    assert "0.weight" in warnings[0]
    assert "torch.manual_seed" in warnings[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"job": {"name": "other"}}, ("'other'", "'loopback'"), id="another-job"),
        pytest.param({"job": {"uid": "uid-2"}}, ("'uid-2'", "'uid-1'"), id="an-older-life-of-the-job"),
        pytest.param(
            {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.1)},
            ("optimizer of param group 0", "SGD", "Adam"),
            id="another-optimizer",
        ),
        pytest.param(
            {"model": lambda: torch.nn.Sequential(torch.nn.Linear(20, 1))},
            ("parameter 0.weight", "float32[1000, 20]", "float32[1, 20]"),
            id="another-model",
        ),
        pytest.param({"trainers": 3}, ("trainers", "1 here, 3 there"), id="another-number-of-trainers"),
        pytest.param(
            {"config": DistributeTranspilerConfig(sync_mode=False)},
            ("mode", "sync here, half_async there"),
            id="another-mode",
        ),
    ],
)
def test_a_trainer_that_does_not_belong_is_refused_and_the_server_stays_up(changes, words):
    with loopback() as job:
        stranger, _, _ = job.make_trainer(**changes)
        with pytest.raises(ConfigurationError) as caught:
            stranger.start()
        assert job.endpoints[0] in str(caught.value)
        for word in words:
            assert word in str(caught.value)
        trainer, model, _ = job.make_trainer()
        trainer.start()
        loss_of(model).backward()
        trainer.step()
        trainer.complete()
        job.servers[0].join()


def test_a_second_trainer_of_the_same_id_and_attempt_is_refused():
    with loopback() as job:
        first, model, _ = job.make_trainer()
        first.start()
        second, _, _ = job.make_trainer()
        with pytest.raises(ConfigurationError, match=r"already joined as trainer 0.*attempt 0"):
            second.start()
        loss_of(model).backward()
        first.step()


def test_a_higher_attempt_fences_the_lower_and_goes_on_at_its_step():
    with loopback(trainers=2) as job:
        zero, model_0, _ = job.make_trainer(0)
        old, model_1, _ = job.make_trainer(1)
        at_once(zero.start, old.start)
        loss_of(model_0).backward()
        loss_of(model_1).backward()
        at_once(zero.step, old.step)
        model_1.zero_grad()
        loss_of(model_1, 2 * X).backward()  # leaves, and is dropped with the life that sent it

        new, model_2, _ = job.make_trainer(1, attempt=1)
        new.start()
        assert new.current_step == 1
        with pytest.raises(FleetError, match="trainer 1 was replaced by its attempt 1"):
            old.step()
        lower, _, _ = job.make_trainer(1, attempt=0)
        with pytest.raises(ConfigurationError, match="attempt 0, but its attempt 1 has already joined"):
            lower.start()

        model_0.zero_grad()
        loss_of(model_0).backward()
        loss_of(model_2).backward()
        at_once(zero.step, new.step)
        assert (zero.current_step, new.current_step) == (2, 2)
        assert all(torch.equal(value, values(model_2)[name]) for name, value in values(model_0).items())
        assert torch.equal(model_0[0].weight, after_steps(2)["0.weight"])


def after_steps(steps: int) -> dict[str, torch.Tensor]:
    """Return what one process has after so many steps on the same data."""
    model = small_model()
    optimizer = sgd(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return values(model)


def test_a_trainer_that_completes_early_leaves_the_divisor_to_the_others():
    with loopback(trainers=2) as job:
        zero, model_0, _ = job.make_trainer(0)
        one, model_1, _ = job.make_trainer(1)
        at_once(zero.start, one.start)
        loss_of(model_0).backward()
        loss_of(model_1).backward()
        at_once(zero.step, one.step)
        assert one.complete() == {1}
        model_0.zero_grad()
        loss_of(model_0).backward()
        zero.step()
        assert zero.complete() == {0, 1}  # each knows who has completed by then
        # Equal gradients, averaged over two and then over one: as one process makes them.
        assert all(torch.equal(value, values(model_0)[name]) for name, value in after_steps(2).items())
        job.servers[0].join()


def test_a_late_trainer_hears_that_it_is_past_the_others_while_their_end_is_taken_note_of(
    caplog, monkeypatch
):
    with loopback(trainers=2) as job:
        (zero, model, _), (one, _, _) = job.make_trainer(0), job.make_trainer(1)
        at_once(zero.start, one.start)
        late, other, _ = job.make_trainer(1, attempt=1)
        late.start()

        def train(trainer: Trainer, trained: torch.nn.Module) -> None:
            trained.zero_grad()
            loss_of(trained).backward()
            trainer.step()

        at_once(lambda: train(zero, model), lambda: train(late, other))
        trainers, stepped = job.servers[0].server._trainers, threading.Event()
        take_note = trainers.completed

        def take_note_later(*given: Any) -> None:
            assert stepped.wait(60)
            take_note(*given)

        monkeypatch.setattr(trainers, "completed", take_note_later)
        ending = threading.Thread(target=zero.complete)
        ending.start()
        train(late, other)  # waits until the server goes on without the other
        train(late, other)
        warning = "trainer 1 joined late, and continues after the others completed at step 1"
        assert warning in caplog.text
        stepped.set()
        ending.join(60)
        late.complete()


def test_a_block_that_waits_is_applied_when_the_missing_trainer_completes():
    with loopback(trainers=2) as job:
        zero, model_0, _ = job.make_trainer(0)
        one, _, _ = job.make_trainer(1)
        at_once(zero.start, one.start)
        loss_of(model_0).backward()
        at_once(zero.step, one.complete)
        assert all(torch.equal(value, values(model_0)[name]) for name, value in after_steps(1).items())


def test_other_hyper_parameters_than_the_other_trainers_are_an_error():
    with loopback(trainers=2) as job:
        zero, model_0, _ = job.make_trainer(0, overlap=False)
        one, model_1, optimizer = job.make_trainer(1, overlap=False)
        at_once(zero.start, one.start)
        loss_of(model_0).backward()
        loss_of(model_1).backward()
        optimizer.param_groups[0]["lr"] = 0.2

        def step_in_vain() -> None:
            with pytest.raises(FleetError):
                zero.step()

        threading.Thread(target=step_in_vain, daemon=True).start()
        server = job.servers[0].server
        wait_for(lambda: server.heartbeat(0, 0).waiting_for, "the first trainer's step")
        with pytest.raises(
            ConfigurationError, match=r"trainer 1 .* lr=0\.2 instead of lr=0\.1 in param group 0"
        ):
            one.step()
        assert job.servers[0].failure is None


def test_without_wait_port_joining_waits_in_the_open_and_not_for_ever(caplog, monkeypatch):
    monkeypatch.setattr(waits, "FIRST_WORD_SECONDS", 0.1)
    with loopback(settings=Settings(heartbeat_seconds=0.05, deadline_seconds=2.0)) as job:
        job.servers[0].server.close()
        trainer, _, _ = job.make_trainer(config=DistributeTranspilerConfig(wait_port=False))
        with pytest.raises(PeerLostError, match=f"parameter server {job.endpoints[0]} does not answer"):
            trainer.start()
    assert f"waiting to join parameter server {job.endpoints[0]}, for 1 s" in caplog.text
    assert " to listen" not in caplog.text


def test_a_trainer_that_waits_to_join_a_server_stays_alive_to_those_that_it_has_joined(monkeypatch):
    job = Loopback(servers=2)
    try:
        first = job.start_server(0).server
        heartbeat, beats = first.heartbeat, itertools.count()
        twice = threading.Event()

        def count(trainer: int, attempt: int) -> Any:
            if next(beats):
                twice.set()
            return heartbeat(trainer, attempt)

        monkeypatch.setattr(first, "heartbeat", count)
        trainer, _, _ = job.make_trainer(config=DistributeTranspilerConfig(wait_port=False))
        joining = threading.Thread(target=trainer.start, daemon=True)
        joining.start()
        assert twice.wait(60), "a sign of life now and then, while the other server is not there"
        job.start_server(1)
        joining.join(60)
        trainer.complete()
    finally:
        job.close()


def test_a_step_whose_gradients_are_absent_everywhere_changes_nothing():
    with loopback() as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        trainer.step()
        assert trainer.current_step == 1
        assert all(torch.equal(value, values(model)[name]) for name, value in after_steps(0).items())


def test_a_barrier_waits_for_every_trainer():
    with loopback(trainers=2) as job:
        zero, _, _ = job.make_trainer(0)
        one, _, _ = job.make_trainer(1)
        at_once(zero.start, one.start)
        passed = threading.Event()

        def arrive_first() -> None:
            zero.session.calls.barrier()
            passed.set()

        first = threading.Thread(target=arrive_first, daemon=True)
        first.start()
        assert not passed.wait(0.3)
        one.session.calls.barrier()
        assert passed.wait(60)
        first.join(60)
        at_once(zero.session.calls.barrier, one.session.calls.barrier)


def test_a_server_of_another_life_is_recognised():
    with loopback() as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        job.servers[0].server.close()
        job.servers[0].join()
        job.start_server(0)
        loss_of(model).backward()
        with pytest.raises(StateLostError, match=f"{job.endpoints[0]} came back without its state"):
            trainer.step()


def test_a_heartbeat_does_not_look_through_the_steps_of_every_trainer_and_block(monkeypatch):
    def look(_: ImmediateServer) -> int:
        raise AssertionError("a heartbeat asked how far training is")

    with loopback(mode=Async()) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        monkeypatch.setattr(ImmediateServer, "step", property(look))
        server = job.servers[0].server
        assert server.heartbeat(trainer=0, attempt=0).incarnation
        monkeypatch.undo()


def test_a_trainer_that_never_joins_is_named_after_the_deadline():
    with loopback(trainers=2, server_settings=replace(QUICK, deadline_seconds=0.5)) as job:
        zero, model, _ = job.make_trainer(0)
        zero.start()
        loss_of(model).backward()
        with pytest.raises(PeerLostError, match="trainer 1 did not join within"):
            zero.step()
        job.servers[0].join()
        assert isinstance(job.servers[0].failure, PeerLostError)


def test_a_silent_trainer_is_lost_although_its_connection_stands():
    with loopback(trainers=2, server_settings=replace(QUICK, deadline_seconds=1.5)) as job:
        zero, model, _ = job.make_trainer(0)
        one, _, _ = job.make_trainer(1)
        at_once(zero.start, one.start)
        stop_beating(one)
        loss_of(model).backward()
        with pytest.raises(PeerLostError, match=r"trainer 1 was heard last \d+ s ago"):
            zero.step()


@pytest.mark.parametrize("trainers", [2, 3])
def test_opposite_orders_through_small_buffers_never_deadlock(trainers):
    """Each trainer sends its blocks in another order, much more than the kernel's buffers hold."""

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.parts: Any = torch.nn.ModuleList(torch.nn.Linear(500, 500) for _ in range(6))

    settings = Settings(heartbeat_seconds=0.05, deadline_seconds=20.0, socket_buffer_bytes=65536)
    with loopback(servers=2, trainers=trainers, model=Wide, settings=settings) as job:
        made = [job.make_trainer(index) for index in range(trainers)]
        at_once(*(trainer.start for trainer, _, _ in made))

        def train(index: int) -> None:
            trainer, model, _ = made[index]
            for step in range(4):
                model.zero_grad()
                order = list(model.parts)[index * 2 :] + list(model.parts)[: index * 2]
                if (index + step) % 2:
                    order.reverse()
                for part in order:
                    part(torch.ones(1, 500)).square().mean().backward()
                trainer.step()

        at_once(*(lambda index=index: train(index) for index in range(trainers)), seconds=60)
        models = [values(model) for _, model, _ in made]
        assert all(
            torch.equal(value, other[name]) for other in models[1:] for name, value in models[0].items()
        )


def test_more_servers_than_blocks_leave_some_without():
    def tiny() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(2, 1)

    with loopback(servers=3, model=tiny) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            trainer.step()
        trainer.complete()
        for running in job.servers:
            running.join()
            assert running.failure is None


def test_a_wait_says_for_what_and_for_whom(caplog, monkeypatch):
    monkeypatch.setattr(waits, "FIRST_WORD_SECONDS", 0.1)
    with loopback(trainers=2) as job:
        zero, model, _ = job.make_trainer(0)
        one, _, _ = job.make_trainer(1)
        at_once(zero.start, one.start)
        loss_of(model).backward()
        stepping = threading.Thread(target=zero.step, daemon=True)
        stepping.start()
        said = r"waiting for 0\.bias of step 0 from .* \(step 0 waits for .* from trainer 1\), for \d+ s"
        wait_for(lambda: re.search(said, caplog.text), "the trainer's words")
        said = rf"parameter server {job.endpoints[0]}: step 0 waits for .* from trainer 1, for \d+ s"
        wait_for(lambda: re.search(said, caplog.text), "the server's words")
        one.complete()
        stepping.join(60)
        assert not stepping.is_alive()
