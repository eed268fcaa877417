"""How long a trainer waits to join servers that are never there."""

import socket
from typing import Any

import pytest
import torch

from fleet.errors import DeadlineExceededError, PeerLostError
from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.render import trainer_plan
from fleet.parameter_server import waits
from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer import agreement, session
from fleet.plan import DistributeTranspilerConfig
from fleet.role_maker.role import JobIdentity


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


def join_one(server: str, settings: Settings, **config: Any) -> None:
    """Let the one trainer of a job with one server join it."""
    model = torch.nn.Linear(3, 1)
    program = Program.from_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**config))
    transpiler.transpile(0, program, server, trainers=1, startup_program=program.startup_program)
    plan = trainer_plan(transpiler.get_trainer_program())
    session.join(plan, dict(model.named_parameters()), JobIdentity(), settings, {})


@pytest.mark.parametrize(("settings", "seconds"), STARTING)
def test_ports_that_never_open_are_waited_for_until_the_deadline_for_starting(monkeypatch, settings, seconds):
    clock = Minutes()
    monkeypatch.setattr(waits, "time", clock)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound, and nobody listens
        server = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeadlineExceededError, match=f"{server} after {seconds:g} s"):
            join_one(server, settings)
    assert clock.now == 1000.0 + seconds


@pytest.mark.parametrize(("settings", "seconds"), STARTING)
def test_without_a_wait_for_ports_a_join_has_until_the_deadline_for_starting(monkeypatch, settings, seconds):
    for module in (session, agreement):
        monkeypatch.setattr(module, "time", Minutes())
    had = []

    def in_vain(*arguments: Any) -> None:
        *_, timeout_seconds, _ = arguments
        had.append(timeout_seconds)
        raise PeerLostError("there is nobody")

    monkeypatch.setattr(ControlClient, "join", in_vain)
    with pytest.raises(PeerLostError, match="there is nobody"):
        join_one("127.0.0.1:1", settings, wait_port=False)
    assert had == [seconds]
