"""Elastic jobs: trainers join servers that run, and leave them, and the others train on."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.checkpoint import TrainStatus
from fleet.errors import ConfigurationError, PeerLostError
from fleet.parameter_server.server.trainers import Trainers
from fleet.plan import DistributeTranspilerConfig
from tests.support.parameter_server import QUICK, Loopback, loopback
from tests.support.processes import wait_for
from tests.support.replicas import job as processes
from tests.support.threads import at_once, one_torch_thread

SCRIPT = Path(__file__).parent / "scripts" / "elastic.py"
ELASTIC = replace(QUICK, max_trainers=3)
IMPATIENT = replace(ELASTIC, deadline_seconds=1.5)
CONFIGS: dict[str, dict[str, Any]] = {
    "async": {"sync_mode": False, "runtime_split_send_recv": True},
    "dc-asgd": {"sync_mode": False, "runtime_split_send_recv": True, "enable_dc_asgd": True},
    "half-async": {"sync_mode": False},
}


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def config(name: str) -> DistributeTranspilerConfig:
    return DistributeTranspilerConfig(**CONFIGS[name])


def make_steps(trainer: Any, model: torch.nn.Module, steps: int) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(4, 20)).square().mean().backward()
        trainer.step()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_trainer_joins_servers_that_run_and_leaves_them(name):
    job: Loopback
    with loopback(
        servers=2, trainers=1, config=config(name), settings=ELASTIC, server_settings=IMPATIENT
    ) as job:
        zero, model_0, _ = job.make_trainer(0)
        zero.start()
        make_steps(zero, model_0, 6)
        servers = [running.server for running in job.servers]
        wait_for(lambda: all(each._mode.step_of(0) == 6 for each in servers), "the steps to arrive")
        two, model_2, _ = job.make_trainer(2, trainers=3)
        one, model_1, _ = job.make_trainer(1, trainers=2)
        at_once(one.start, two.start)
        assert (one.current_step, two.current_step) == (6, 6)
        at_once(
            one.session.calls.barrier, two.session.calls.barrier, zero.session.calls.barrier
        )  # which counts them all
        for trainer, model in ((one, model_1), (two, model_2), (zero, model_0)):
            make_steps(trainer, model, 3)
        two.close()  # as one that was deleted
        zero.complete()
        make_steps(one, model_1, 3)
        one.complete()
        assert one.current_step == 12
        for running in job.servers:
            running.join()
            assert running.failure is None
            assert running.server._trainers.membership.gone == (2,)


def test_a_job_that_all_its_trainers_have_left_fails():
    with loopback(trainers=1, config=config("async"), settings=ELASTIC, server_settings=IMPATIENT) as job:
        zero, _, _ = job.make_trainer(0)
        one, _, _ = job.make_trainer(1, trainers=2)
        zero.start()
        one.start()
        zero.close()
        one.close()
        job.servers[0].join()
        assert isinstance(job.servers[0].failure, PeerLostError)
        assert "trainers 0 and 1 vanished for good" in str(job.servers[0].failure)


def test_a_trainer_that_comes_too_late_has_lost_its_peers(monkeypatch):
    with loopback(trainers=1, config=config("async"), settings=ELASTIC) as job:
        zero, model_0, _ = job.make_trainer(0)
        zero.start()
        make_steps(zero, model_0, 1)
        late, _, _ = job.make_trainer(1, trainers=2)
        errors, joins = [], []
        join = job.servers[0].server.join

        def count(request: Any) -> Any:
            joins.append(request)
            return join(request)

        monkeypatch.setattr(job.servers[0].server, "join", count)

        def come_too_late(_: Trainers) -> None:
            with pytest.raises(PeerLostError, match="trainer 1 joined after every other trainer") as error:
                late.start()
            errors.append(error)

        monkeypatch.setattr(Trainers, "wait_for_goodbyes", come_too_late)
        zero.complete()
        job.servers[0].join()
        assert (len(errors), job.servers[0].failure) == (1, None)
        assert len(joins) == 1, "it asked again a server that was about to end"


def test_any_number_of_trainers_goes_on_from_a_checkpoint(tmp_path):
    with loopback(trainers=1, config=config("async"), settings=ELASTIC) as job:
        zero, model_0, _ = job.make_trainer(0)
        zero.start()
        make_steps(zero, model_0, 3)
        zero.save(str(tmp_path), TrainStatus())
        one, model_1, _ = job.make_trainer(1, trainers=2)
        one.start()
        one.load(str(tmp_path))  # as its script does at every start; the servers' values stay
        assert one.current_step == 3
        make_steps(one, model_1, 2)
    with loopback(tmp_path, trainers=2, config=config("async"), settings=ELASTIC) as job:
        zero, _, _ = job.make_trainer(0)
        one, _, _ = job.make_trainer(1)
        at_once(zero.start, one.start)
        assert (zero.current_step, one.current_step) == (3, 3)


def test_a_process_of_a_job_that_is_not_elastic_does_not_join_one():
    with loopback(trainers=1, config=config("async"), settings=ELASTIC) as job:
        trainer, _, _ = job.make_trainer(0)
        job.settings = QUICK
        fixed, _, _ = job.make_trainer(0)
        with pytest.raises(ConfigurationError, match="trainers: up to 3 here, 1 there"):
            fixed.start()
        trainer.start()
        trainer.complete()


def test_a_mode_that_needs_a_fixed_number_of_trainers_has_no_elastic_job():
    with (
        pytest.raises(ConfigurationError, match="mode sync, which needs a fixed number"),
        loopback(settings=ELASTIC),
    ):
        pass


@pytest.mark.timeout(300)
def test_digits_are_learned_by_one_trainer_then_three_then_two(tmp_path):
    enough = tmp_path / "enough"
    with processes(
        tmp_path, servers=2, trainers=1, FLEET_SYNC_MODE="Async", FLEET_MAX_TRAINERS="3"
    ) as running:
        servers = [running.server(i, SCRIPT, str(enough), FLAGS_rpc_deadline="8000") for i in range(2)]
        trainers = [running.trainer(0, SCRIPT, str(enough))]
        trainers[0].wait_for_output("has trained", seconds=120)
        trainers += [running.trainer(index, SCRIPT, str(enough), PADDLE_TRAINERS_NUM="3") for index in (1, 2)]
        for trainer in trainers[1:]:
            trainer.wait_for_output(r"joined at step [1-9]\d* one of 3", seconds=120)
            trainer.wait_for_output("has trained", seconds=60)
        surplus = trainers.pop()
        surplus.process.send_signal(signal.SIGTERM)
        surplus.wait()
        for server in servers:
            server.wait_for_output("trainer 2 lost its connection.* training continues with trainers 0 and 1")
        enough.touch()
        for trainer in trainers:
            trainer.expect(0, "accuracy 0.9", seconds=60)
        for server in servers:
            server.expect(0, seconds=60)
