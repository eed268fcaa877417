"""A training mode written outside the package trains, through the public calls alone."""

import threading
from typing import Any

import pytest
import torch

from fleet import role_maker
from fleet.errors import ConfigurationError, TranspileError
from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.render import trainer_plan
from fleet.parameter_server import Fleet
from fleet.parameter_server.modes import Async
from fleet.process import lifecycle
from fleet.strategy import DistributedStrategy
from tests.runtime.parameter_server.elastic_averaging import ElasticAveraging
from tests.support.digits import accuracy, network, train
from tests.support.modes import OneServer, ScriptedSession
from tests.support.parameter_server import loopback
from tests.support.processes import free_ports
from tests.support.threads import at_once

MODE = ElasticAveraging(period=4, alpha=0.5)


@pytest.fixture(autouse=True)
def _leave_the_test_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "start", lambda _: None)
    monkeypatch.setattr(lifecycle, "finish", lambda *_: None)


def test_its_arithmetic():
    server = OneServer(MODE, 2)
    server.begin(0, 3, ())
    server.send(0, 0, 8.0, step=3)
    assert (server.value(0), server.sent(0, 0)) == (4.0, 4.0)
    session = ScriptedSession(ElasticAveraging(period=1, alpha=0.5))
    trainer = ElasticAveraging(period=1, alpha=0.5).make_trainer(session)
    with torch.no_grad():
        for parameter in session.parameters.values():
            parameter.fill_(8.0)
    session.at_once = {"b": 4.0, "w": 4.0}
    trainer.finish(())
    assert session.sent == [(0, (), {0: [8.0], 1: [8.0] * 4})]
    assert float(session.parameters["b"].detach()[0]) == 4.0


def test_a_job_trains_with_it_by_its_strategy_alone():
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(2)]
    learned: list[float] = []

    def replica(kind: role_maker.RoleKind, index: int, built: threading.Barrier) -> None:
        fleet = Fleet()
        fleet.init(role_maker.UserDefinedRoleMaker(index, kind, 2, endpoints))
        with seeding:
            model = network()
        wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fleet.distributed_optimizer(wrapped, DistributedStrategy(mode=MODE), model=model)
        built.wait(60)
        if fleet.is_server():
            fleet.init_server()
            fleet.run_server()
            return
        fleet.init_worker()
        train(model, optimizer.step, 10, index, 2)
        assert fleet.step == 10 * 23
        fleet.barrier_worker()
        fleet.stop_worker()
        learned.append(accuracy(model))

    seeding, built = threading.Lock(), threading.Barrier(4)
    kinds = [role_maker.Role.SERVER, role_maker.Role.WORKER]
    at_once(
        *(lambda kind=kind, index=index: replica(kind, index, built) for kind in kinds for index in range(2)),
        seconds=90,
    )
    assert len(learned) == 2
    assert learned[0] == learned[1] >= 0.9


def test_its_name_and_its_options_must_be_alike_everywhere():
    with loopback(mode=MODE) as job:
        for mode, words in (
            (None, "mode: elastic-averaging here, sync there"),
            (ElasticAveraging(period=5, alpha=0.5), "elastic-averaging: period: 4 here, 5 there"),
        ):
            job._mode = mode
            trainer, _, _ = job.make_trainer()
            with pytest.raises(ConfigurationError, match=words):
                trainer.start()


def captured() -> Program:
    model = network()
    return Program.from_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_a_program_does_not_run_without_the_modes_object():
    program, transpiler = captured(), DistributeTranspiler(mode=MODE)
    transpiler.transpile(0, program=program, startup_program=program.startup_program)
    made = transpiler.get_trainer_program()
    assert trainer_plan(made).custom is MODE
    made.mode = None
    with pytest.raises(TranspileError, match=r"for the mode 'elastic-averaging', and its `mode` is none"):
        trainer_plan(made)


def test_what_is_no_mode_is_refused_when_it_is_to_run():
    class Named:
        name = "named"
        programs = MODE.programs

        def agreement(self) -> dict[str, str]:
            return {}

    named: Any = Named()
    with (
        pytest.raises(
            ConfigurationError, match=r"is a Named; expected .* fleet\.parameter_server\.modes\.Mode"
        ),
        loopback(mode=named),
    ):
        pass


@pytest.mark.parametrize("half", ["ServerMode", "TrainerMode"])
def test_a_half_without_the_default_methods_is_refused(half):
    class Bare(Async):
        def make_server(self, shard: Any, num_trainers: int) -> Any:
            return object() if half == "ServerMode" else super().make_server(shard, num_trainers)

        def make_trainer(self, session: Any) -> Any:
            return object()

    expected = (
        rf"the mode 'async' made a object; expected a subclass of fleet\.parameter_server\.modes\.{half}"
    )
    with pytest.raises(ConfigurationError, match=expected), loopback(mode=Bare()) as job:
        job.make_trainer()[0].start()
