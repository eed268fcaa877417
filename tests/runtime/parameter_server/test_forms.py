"""The loop form and the program form drive one session: what one starts, the other finds."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

import fleet as package
from fleet import role_maker
from fleet.errors import ConfigurationError
from fleet.parameter_server import Fleet
from fleet.parameter_server.server.server import Server
from fleet.parameter_server.sessions import find_trainer
from fleet.plan import DistributedMode
from fleet.process import lifecycle
from tests.support.processes import free_ports


def mean_square(model: Any, x: torch.Tensor) -> Any:
    return model(x).square().mean()


FEED = {"x": np.ones((4, 20), dtype=np.float32)}


class Replica:
    """One replica of a job with one server and one trainer, in this process."""

    def __init__(
        self,
        kind: Any,
        endpoint: str,
        strategy: package.DistributedStrategy | package.DistributeTranspilerConfig | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.fleet = Fleet()
        self.fleet.init(role_maker.UserDefinedRoleMaker(0, kind, 1, [endpoint]))
        self.model = torch.nn.Linear(20, 1)
        wrapped = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = self.fleet.distributed_optimizer(wrapped, strategy, model=self.model)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("start", "finish"):  # the test's process is no replica
        monkeypatch.setattr(lifecycle, name, lambda *_: None)
    monkeypatch.setenv("FLAGS_rpc_deadline", "20000")
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def server(endpoint: str) -> threading.Thread:
    replica = Replica(role_maker.Role.SERVER, endpoint)
    replica.fleet.init_server()
    thread = threading.Thread(target=replica.fleet.run_server, daemon=True)
    thread.start()
    return thread


def alone(steps: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        mean_square(model, torch.ones(4, 20)).backward()
        optimizer.step()
    return model.weight.detach()


def test_numbers_of_threads_are_said_once_to_change_nothing(endpoint, monkeypatch, caplog):
    monkeypatch.setenv("FLAGS_rpc_send_thread_num", "8")
    caplog.set_level("INFO", "fleet")
    served = Replica(role_maker.Role.SERVER, endpoint)
    served.fleet.init_server()
    serving = threading.Thread(target=served.fleet.run_server, daemon=True)
    serving.start()
    trainer = Replica(role_maker.Role.WORKER, endpoint)
    trainer.fleet.init_worker()
    trainer.fleet.stop_worker()
    serving.join(60)
    said = (
        "FLAGS_rpc_send_thread_num is 8, but has no effect: one connection with each server carries all "
        "dense parameters, and one thread serves all connections"
    )
    assert caplog.text.count(said) == 1
    assert "FLAGS_rpc_get_thread_num" not in caplog.text


@pytest.mark.parametrize("joins", ["init_worker", "startup_program", "both"])
def test_minimize_and_an_executor_train_in_the_fleets_session(endpoint, server, joins):
    trainer = Replica(role_maker.Role.WORKER, endpoint)
    trainer.optimizer.minimize(mean_square)
    executor = package.Executor()
    if joins != "startup_program":
        trainer.fleet.init_worker()
    if joins != "init_worker":
        executor.run(trainer.fleet.startup_program)
    for _ in range(3):
        executor.run(trainer.fleet.main_program, FEED, ["loss"])
    executor.close()
    server.join(60)
    assert not server.is_alive()
    assert torch.equal(trainer.model.weight, alone(3))


def test_a_server_by_the_program_form_serves_a_trainer_by_the_loop_form(endpoint):
    served = Replica(role_maker.Role.SERVER, endpoint)
    served.optimizer.minimize(mean_square)

    def serve() -> None:
        executor = package.Executor()
        executor.run(served.fleet.startup_program)
        executor.run(served.fleet.main_program)
        executor.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    trainer = Replica(role_maker.Role.WORKER, endpoint)
    trainer.fleet.init_worker()
    mean_square(trainer.model, torch.ones(4, 20)).backward()
    trainer.optimizer.step()
    assert trainer.fleet.step == 1
    trainer.fleet.stop_worker()
    thread.join(60)
    assert not thread.is_alive()
    assert torch.equal(trainer.model.weight, alone(1))


def test_joining_twice_is_refused(endpoint, server):
    trainer = Replica(role_maker.Role.WORKER, endpoint)
    trainer.fleet.init_worker()
    with pytest.raises(ConfigurationError, match="init_worker was called a second time"):
        trainer.fleet.init_worker()
    trainer.fleet.stop_worker()
    server.join(60)


@pytest.mark.parametrize("by_executor", [False, True])
def test_what_the_strategy_says_reaches_a_session_of_either_form(endpoint, monkeypatch, by_executor):
    strategy = package.DistributedStrategy(overlap=False, transport="tcp", server_kernels="fused")
    made: list[Server] = []
    start = Server.start

    def starting(server: Server) -> None:
        made.append(server)
        start(server)

    monkeypatch.setattr(Server, "start", starting)
    served = Replica(role_maker.Role.SERVER, endpoint, strategy)
    trainer = Replica(role_maker.Role.WORKER, endpoint, strategy)
    if by_executor:
        for replica in (served, trainer):
            replica.optimizer.minimize(mean_square)
    else:
        served.fleet.init_server()

    def serving() -> None:
        if by_executor:
            package.Executor().run(served.fleet.main_program)
        else:
            served.fleet.run_server()

    thread = threading.Thread(target=serving, daemon=True)
    thread.start()
    if by_executor:
        package.Executor().run(trainer.fleet.startup_program)
    else:
        trainer.fleet.init_worker()
    source = trainer.fleet.main_program.source
    assert source is not None
    session = find_trainer(source)
    assert session is not None
    assert (session._overlap, session.session.settings.transport) == (False, "tcp")
    trainer.fleet.stop_worker()
    thread.join(60)
    assert not thread.is_alive()
    assert (made[0]._settings.fused, made[0]._settings.transport) == (True, "tcp")


def test_a_transpilers_config_in_place_of_a_strategy_says_how_a_job_trains(endpoint):
    config = package.DistributeTranspilerConfig(geo_sgd_mode=True, geo_sgd_need_push_nums=2)
    served = Replica(role_maker.Role.SERVER, endpoint, config)
    trainer = Replica(role_maker.Role.WORKER, endpoint, config)
    for replica in (served, trainer):
        assert replica.fleet.main_program.attr("distributed_mode") == DistributedMode.GEO
    served.fleet.init_server()
    thread = threading.Thread(target=served.fleet.run_server, daemon=True)
    thread.start()
    trainer.fleet.init_worker()
    for _ in range(3):
        trainer.optimizer.zero_grad()
        mean_square(trainer.model, torch.ones(4, 20)).backward()
        trainer.optimizer.step()
    exported = trainer.fleet.export_state_dict()["weight"]
    trainer.fleet.stop_worker()
    thread.join(60)
    assert not thread.is_alive()
    torch.testing.assert_close(exported, alone(3))
    assert config == package.DistributeTranspilerConfig(geo_sgd_mode=True, geo_sgd_need_push_nums=2)
