"""What a trainer's session says while it waits, and how long it waits for servers that are never there."""

import logging
import socket
from typing import Any, cast

import pytest
import torch

from fleet.errors import DeadlineExceededError, PeerLostError
from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.render import trainer_plan
from fleet.parameter_server import waiting
from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer import agreement, waits
from fleet.parameter_server.trainer import client as client_module
from fleet.parameter_server.trainer.client import Client
from fleet.parameter_server.waiting import WaitLog
from fleet.plan import DistributeTranspilerConfig
from fleet.role_maker.role import JobIdentity


class Clock:
    """Stands in for a condition: a wait lasts for a minute, and the value comes by the end of the second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.awaited = ["weight"]

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

    def wait(self, _: float) -> None:
        self.now += 60.0
        if self.now == 120.0:
            self.awaited.clear()


class Minutes:
    """Stands in for the module `time`: each time that somebody sleeps, a minute passes at once."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += 60.0


STARTING = [
    pytest.param(Settings(deadline_seconds=180.0, start_deadline_seconds=3600.0), 3600.0, id="its-own"),
    pytest.param(Settings(deadline_seconds=180.0, start_deadline_seconds=30.0), 180.0, id="a-shorter-one"),
    pytest.param(Settings(deadline_seconds=180.0), 180.0, id="none"),
]


def client_of(server: str, settings: Settings, **config: Any) -> Client:
    """Return the client of the one trainer of a job with one server."""
    model = torch.nn.Linear(3, 1)
    program = Program.from_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**config))
    transpiler.transpile(0, program, server, trainers=1, startup_program=program.startup_program)
    plan = trainer_plan(transpiler.get_trainer_program())
    return Client(plan, JobIdentity(), cast("Any", None), settings)


@pytest.mark.parametrize(("settings", "seconds"), STARTING)
def test_ports_that_never_open_are_waited_for_until_the_deadline_for_starting(monkeypatch, settings, seconds):
    clock = Minutes()
    monkeypatch.setattr(waiting, "time", clock)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound, and nobody listens
        server = f"127.0.0.1:{silent.getsockname()[1]}"
        client = client_of(server, settings)
        with pytest.raises(DeadlineExceededError, match=f"{server} after {seconds:g} s"):
            client.start()
    assert clock.now == 1000.0 + seconds


@pytest.mark.parametrize(("settings", "seconds"), STARTING)
def test_without_a_wait_for_ports_a_join_has_until_the_deadline_for_starting(monkeypatch, settings, seconds):
    for module in (client_module, agreement):
        monkeypatch.setattr(module, "time", Minutes())
    had = []

    def in_vain(*arguments: Any) -> None:
        *_, timeout_seconds, _ = arguments
        had.append(timeout_seconds)
        raise PeerLostError("there is nobody")

    monkeypatch.setattr(ControlClient, "join", in_vain)
    client = client_of("127.0.0.1:1", settings, wait_port=False)
    with pytest.raises(PeerLostError, match="there is nobody"):
        client.start()
    assert had == [seconds]


def test_what_has_come_is_not_said_to_be_awaited(monkeypatch, caplog):
    clock = Clock()
    monkeypatch.setattr(waits, "WaitLog", lambda _: WaitLog(lambda: clock.now))
    client = client_of("a:1", Settings())
    client.waits.changed = cast("Any", clock)
    with caplog.at_level(logging.WARNING):
        client.session.wait_until(lambda: not clock.awaited, lambda: ", ".join(clock.awaited) or "nothing")
    assert caplog.messages == ["waiting for weight, for 60 s"]
