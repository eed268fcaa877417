"""A user's optimizer that fails on a server: whoever trains with it is told why, and nobody trains on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.modes import Async
from fleet.parameter_server.server import trainers as trainers_module
from fleet.parameter_server.server.peer_servers import PeerServers
from fleet.parameter_server.server.trainer_session import TrainerSession
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer import server_connection
from fleet.parameter_server.transport.sockets import dial
from tests.runtime.parameter_server.slow_step import SlowStep
from tests.support.parameter_server import Loopback, loopback
from tests.support.processes import wait_for
from tests.support.threads import at_once


class OutOfRange(torch.optim.SGD):
    """Steps no parameter whose gradient is large."""

    def step(self, closure: Any = None) -> Any:
        if any(float(p.grad.max()) > 10 for group in self.param_groups for p in group["params"]):
            raise ArithmeticError("a gradient is out of range")
        return super().step(closure)


def one_parameter() -> torch.nn.Module:
    return torch.nn.Linear(4, 1, bias=False)


def out_of_range(parameters: Any) -> torch.optim.Optimizer:
    return OutOfRange(parameters, lr=0.1)


def train(trainer: Any, model: Any, gradient: float, steps: int) -> None:
    """Train with this gradient."""
    for _ in range(steps):
        model.zero_grad()
        (gradient * model(torch.ones(1, 4))).sum().backward()
        trainer.step()
    trainer.complete()


def told(trainer: Any, model: Any, gradient: float, steps: int = 1) -> str:
    """Return the sentence with which a training ends."""
    with pytest.raises(FleetError) as caught:
        train(trainer, model, gradient, steps)
    return str(caught.value)


def ends_with(job: Loopback, reason: str) -> None:
    """Wait for the first server to end, for this reason."""
    job.servers[0].join()
    failure = job.servers[0].failure
    assert failure is not None
    assert failure.exit_code
    assert reason in str(failure)


@pytest.mark.parametrize(
    "grad_clip", [None, fleet.ClipGradByGlobalNorm(1e6)], ids=["unclipped", "clipped-by-a-norm"]
)
@pytest.mark.parametrize("least_bytes", [0, 1 << 30], ids=["in-the-pool", "by-who-receives"])
def test_an_optimizer_that_fails_in_sync_mode_ends_the_server_and_tells_every_trainer(
    grad_clip, least_bytes, monkeypatch
):
    monkeypatch.setattr(trainers_module, "LEAST_BYTES", least_bytes)
    monkeypatch.setattr(trainers_module, "available_cores", lambda: 2)
    with loopback(trainers=2, model=one_parameter, optimizer=out_of_range, grad_clip=grad_clip) as job:
        trainers = [job.make_trainer(index)[:2] for index in range(2)]
        at_once(*(trainer.start for trainer, _ in trainers))
        sentences = at_once(*(partial(told, trainer, model, 100.0) for trainer, model in trainers))
        reason = f"server {job.endpoints[0]} could not be stepped: ArithmeticError: a gradient is out of"
        assert all(reason in sentence for sentence in sentences)
        ends_with(job, reason)


def test_an_optimizer_that_fails_without_a_barrier_ends_the_server_and_tells_every_trainer(caplog):
    with loopback(trainers=2, model=one_parameter, optimizer=out_of_range, mode=Async()) as job:
        trainers = [job.make_trainer(index)[:2] for index in range(2)]
        at_once(*(trainer.start for trainer, _ in trainers))
        sentences = at_once(
            lambda: told(*trainers[0], 100.0),
            lambda: told(*trainers[1], 1.0, steps=1_000_000),
        )
        reason = f"server {job.endpoints[0]} could not be stepped: ArithmeticError: a gradient is out of"
        assert all(reason in sentence for sentence in sentences)
        ends_with(job, reason)
        assert "to come back" not in caplog.text


def test_an_optimizer_that_fails_when_another_server_has_told_its_part_of_a_norm(monkeypatch):
    """The thread that meets the error serves the other server, and no trainer."""
    send, heard, told_last = PeerServers.send, threading.Event(), threading.Event()

    def in_turn(peers: PeerServers, part: Any, servers: Any) -> None:
        if part.server == 0:
            heard.set()
            return
        heard.wait(10)
        told_last.set()
        send(peers, part, servers)

    monkeypatch.setattr(PeerServers, "send", in_turn)
    with loopback(
        servers=2,
        model=lambda: torch.nn.Linear(4, 1),
        optimizer=out_of_range,
        grad_clip=fleet.ClipGradByGlobalNorm(1e6),
    ) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        reason = f"server {job.endpoints[0]} could not be stepped: ArithmeticError: a gradient is out of"
        assert reason in told(trainer, model, 100.0)
        assert told_last.is_set()
        ends_with(job, reason)
        assert job.servers[1].failure is None


def test_a_step_that_fails_while_its_trainer_waits_to_be_greeted_again_tells_it_why(monkeypatch):
    settings = Settings(heartbeat_seconds=1.0, deadline_seconds=10.0)
    with loopback(model=one_parameter, settings=settings) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        step = SlowStep(job, monkeypatch, fails=ConfigurationError("no rule steps it"))
        session = job.servers[0].server._trainers.sessions[0]

        def fail_later() -> None:
            assert step.begun.wait(60)
            trainer.session.connections[0].stream.hang_up()
            wait_for(session._resumption.lock.locked, "another connection to be waiting for the step")
            step.may_end.set()

        def be_told() -> None:
            with pytest.raises(ConfigurationError, match="could not be stepped: no rule steps it"):
                train(trainer, model, 1.0, 1)

        at_once(fail_later, be_told)
        ends_with(job, "no rule steps it")


@contextmanager
def away(job: Loopback, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Break a trainer's connection; it dials again once the event that this gives is set, or at the end."""
    dials, may_dial = threading.Event(), threading.Event()

    def dial_later(*arguments: Any, **options: Any) -> Any:
        dials.set()
        assert may_dial.wait(60)
        return dial(*arguments, **options)

    monkeypatch.setattr(server_connection, "dial", dial_later)
    trainer.session.connections[0].stream.hang_up()
    assert dials.wait(60)
    stream = job.servers[0].server._trainers.sessions[0].stream
    wait_for(lambda: stream._connection is None, "the server to see that it broke")
    try:
        yield may_dial
    finally:
        may_dial.set()


OF_TCP = Settings(heartbeat_seconds=1.0, deadline_seconds=10.0, transport="tcp")
REASON = "could not be stepped: ArithmeticError: a gradient is out of"


def test_a_trainer_without_a_connection_when_a_server_fails_comes_back_and_hears_why(monkeypatch):
    shape: dict[str, Any] = {"trainers": 2, "model": one_parameter, "optimizer": out_of_range}
    with loopback(**shape, mode=Async(), settings=OF_TCP) as job:
        (zero, _, _), (one, model, _) = (job.make_trainer(index) for index in range(2))
        at_once(zero.start, one.start)
        session = job.servers[0].server._trainers.sessions[0]
        with away(job, zero, monkeypatch) as may_dial:
            wait = session.ending.notified.wait

            def wait_for_the_trainer(seconds: float) -> bool:
                may_dial.set()
                return wait(seconds)

            monkeypatch.setattr(session.ending.notified, "wait", wait_for_the_trainer)
            assert REASON in told(one, model, 100.0)
            client = zero.session
            assert REASON in str(wait_for(lambda: client._failure, "the word that it ends"))
        ends_with(job, REASON)


def test_a_server_that_fails_tells_every_trainer_at_the_same_time(monkeypatch):
    fail, begun, all_are_told = TrainerSession.fail, set[int](), threading.Barrier(3)

    def told_with_the_others(session: TrainerSession, *arguments: Any) -> None:
        if session.identity.trainer not in begun:
            begun.add(session.identity.trainer)
            all_are_told.wait(20)
        fail(session, *arguments)

    monkeypatch.setattr(TrainerSession, "fail", told_with_the_others)
    with loopback(trainers=3, model=one_parameter, optimizer=out_of_range) as job:
        trainers = [job.make_trainer(index)[:2] for index in range(3)]
        at_once(*(trainer.start for trainer, _ in trainers))
        sentences = at_once(*(partial(told, trainer, model, 100.0) for trainer, model in trainers))
        assert all("a gradient is out of range" in sentence for sentence in sentences)


def test_a_server_that_fails_lets_nobody_join_and_waits_for_nobody_for_ever(monkeypatch):
    shape: dict[str, Any] = {"trainers": 2, "model": one_parameter, "optimizer": out_of_range}
    with loopback(**shape, mode=Async(), settings=OF_TCP) as job:
        (zero, _, _), (one, model, _) = (job.make_trainer(index) for index in range(2))
        at_once(zero.start, one.start)
        again, _, _ = job.make_trainer(1, attempt=1)
        with away(job, zero, monkeypatch):
            assert REASON in told(one, model, 100.0)
            wait_for(
                lambda: job.servers[0].server._serving.failure is not None, "the server to know that it ends"
            )
            with pytest.raises(FleetError, match=REASON):
                again.start()
            ends_with(job, REASON)


def test_a_trainer_that_joins_just_as_a_server_fails_is_told_why(monkeypatch):
    with loopback(trainers=2, model=one_parameter, mode=Async(), settings=OF_TCP) as job:
        trainer, _, _ = job.make_trainer()
        server = job.servers[0].server
        admit = server._mode.admit

        def fail_meanwhile(number: int, incarnation: int) -> None:
            admit(number, incarnation)
            server._serving.fail(FleetError("the disk is full"))

        monkeypatch.setattr(server._mode, "admit", fail_meanwhile)
        with pytest.raises(FleetError, match="the disk is full"):
            trainer.start()
        assert not server._trainers.sessions
        ends_with(job, "the disk is full")
