"""What a trainer's session says while it waits."""

import logging
from typing import Any, cast

import torch

from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer import waits
from fleet.parameter_server.trainer.client import Client
from fleet.parameter_server.waiting import WaitLog
from fleet.program import Program
from fleet.role_maker.role import JobIdentity
from fleet.transpiler import DistributeTranspiler, trainer_plan


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


def test_what_has_come_is_not_said_to_be_awaited(monkeypatch, caplog):
    model = torch.nn.Linear(3, 1)
    program = Program.from_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    transpiler = DistributeTranspiler()
    transpiler.transpile(
        0, program=program, pservers="a:1", trainers=1, startup_program=program.startup_program
    )
    clock = Clock()
    monkeypatch.setattr(waits, "WaitLog", lambda _: WaitLog(lambda: clock.now))
    plan = trainer_plan(transpiler.get_trainer_program())
    client = Client(plan, JobIdentity(), cast("Any", None), Settings())
    client.waits.changed = cast("Any", clock)
    with caplog.at_level(logging.WARNING):
        client.session.wait_until(lambda: not clock.awaited, lambda: ", ".join(clock.awaited) or "nothing")
    assert caplog.messages == ["waiting for weight, for 60 s"]
