"""The Fleet API as a script uses it, every role in a thread of one process, over loopback."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fleet as package
from fleet import TrainStatus
from fleet.errors import CheckpointError, ConfigurationError, DeadlineExceededError
from fleet.facade import parameter_server as facade
from fleet.parameter_server import Fleet
from fleet.parameter_server.settings import Settings
from fleet.process import lifecycle
from fleet.role_maker import Role, UserDefinedRoleMaker
from tests.support.checkpoints import flip_a_bit
from tests.support.processes import free_ports
from tests.support.threads import at_once, one_torch_thread

X = torch.linspace(-1, 1, 60).reshape(3, 20)


@pytest.fixture(autouse=True)
def _leave_the_test_process_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lifecycle, "start", lambda _: None)
    monkeypatch.delenv("FLEET_CHECKPOINT_DIR", raising=False)
    with one_torch_thread():
        yield


def build() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 1000), torch.nn.BatchNorm1d(1000), torch.nn.Linear(1000, 1)
    )


def loss_fn(model: Any, x: Any) -> Any:
    return model(x).square().mean()


class Trainer:
    """One trainer's script, as far as all tests have it in common."""

    def __init__(self, index: int, endpoints: list[str], trainers: int, *, named: bool = True) -> None:
        self.fleet = Fleet()
        self.fleet.init(UserDefinedRoleMaker(index, Role.WORKER, trainers, endpoints))
        self.model = build()
        self.adam = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer = self.fleet.distributed_optimizer(self.adam, model=self.model if named else None)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_fn(self.model, X * (1 + self.fleet.worker_index())).backward()
            self.optimizer.step()


@contextmanager
def job(
    servers: int = 1, trainers: int = 1, before: Callable[[Fleet], Any] = lambda _: None, **options: Any
) -> Iterator[list[Trainer]]:
    """Give trainers that have joined; `before` is what a server's script does before it serves."""
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(servers)]
    fleets = []
    for index in range(servers):
        fleet = Fleet()
        fleet.init(UserDefinedRoleMaker(index, Role.SERVER, trainers, endpoints))
        model = build()
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        fleet.distributed_optimizer(adam, model=model if options.get("named", True) else None)
        before(fleet)
        fleet.init_server(*options.get("model_dir", ()))
        fleets.append(fleet)
    threads = [threading.Thread(target=fleet.run_server, daemon=True) for fleet in fleets]
    for thread in threads:
        thread.start()
    named = options.get("named", True)
    made = [Trainer(index, endpoints, trainers, named=named) for index in range(trainers)]
    try:
        at_once(*(trainer.fleet.init_worker for trainer in made))
        yield made
        at_once(*(trainer.fleet.stop_worker for trainer in made))
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a server still serves"
    finally:
        for fleet in fleets:
            if fleet._server is not None:
                fleet._server.close()


def test_a_job_saves_is_cleaned_up_and_goes_on_where_it_was(tmp_path):
    folder = str(tmp_path)

    def script(trainer: Trainer, epochs: range) -> None:
        fleet = trainer.fleet
        for epoch in epochs:
            trainer.train(2)
            fleet.save_check_point(None, folder, TrainStatus(epoch, state={"seen": epoch * 10}))
            fleet.barrier_worker()
        fleet.clean_redundant_check_points(folder, checkpoint_num=2)
        fleet.barrier_worker()

    with job(servers=2, trainers=2) as (zero, one):
        assert zero.fleet.load_check_point(folder) == TrainStatus()
        at_once(lambda: script(zero, range(3)), lambda: script(one, range(3)))
        assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
        at_once(lambda: zero.train(2), lambda: one.train(2))
        expected = zero.fleet.export_state_dict()

    def load(fleet: Fleet) -> None:
        assert fleet.load_check_point(None, folder, trainer_id=0) == TrainStatus(2, 6, {"seen": 20})

    with job(servers=3, trainers=2, before=load) as (zero, one):
        assert (zero.fleet.step, one.fleet.step) == (6, 6)
        assert zero.fleet.load_check_point(folder).next() == 3
        assert int(zero.model[1].num_batches_tracked) == 6
        at_once(lambda: zero.train(2), lambda: one.train(2))
        found = zero.fleet.export_state_dict()
        differing = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert differing == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", ["a-bit", "a-fifo", "a-directory"])
def test_a_server_whose_script_loads_passes_a_damaged_one_over_and_says_so_once(tmp_path, caplog, damage):
    folder = str(tmp_path)
    with job() as (trainer,):
        for epoch in range(2):
            trainer.train(1)
            trainer.fleet.save_check_point(folder, TrainStatus(epoch))
    (part,) = (tmp_path / "checkpoint-1").glob("trainer-*")
    if damage == "a-bit":
        flip_a_bit(part)
    else:
        part.unlink()
        (os.mkfifo if damage == "a-fifo" else os.mkdir)(part)

    def load(fleet: Fleet) -> None:
        assert fleet.load_check_point(folder) == TrainStatus(0, 1)

    with job(before=load) as (trainer,):
        assert trainer.fleet.step == 1
        assert trainer.fleet.load_check_point(folder) == TrainStatus(0, 1)
        trainer.train(1)
    assert caplog.text.count("skipped a damaged checkpoint") == 1
    assert str(part) in caplog.text


@pytest.mark.parametrize("way", ["model_dir", "environment", "load_persistables"])
def test_a_server_begins_with_a_checkpoint_in_each_of_its_ways(tmp_path, monkeypatch, way):
    with job() as (trainer,):
        trainer.train(3)
        trainer.fleet.save_persistables(str(tmp_path), state={"x": 1})
        expected = trainer.fleet.export_state_dict()
    options: dict[str, Any] = {}
    if way == "model_dir":
        options["model_dir"] = (tmp_path,)
    elif way == "environment":
        monkeypatch.setenv("FLEET_CHECKPOINT_DIR", str(tmp_path))
    else:
        options["before"] = lambda fleet: fleet.load_persistables(None, tmp_path)
    with job(**options) as (trainer,):
        assert trainer.fleet.step == 3
        assert trainer.fleet.load_persistables(tmp_path).state == {"x": 1}
        found = trainer.fleet.export_state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_environment_names_the_directory_when_nobody_else_does(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_CHECKPOINT_DIR", str(tmp_path))
    with job() as (trainer,):
        trainer.train(1)
        trainer.fleet.save_check_point(train_status=TrainStatus(0))
        assert trainer.fleet.load_check_point().epoch_no == 0
    assert (tmp_path / "checkpoint-0" / "manifest.json").is_file()


def test_only_trainer_zero_saves_and_a_missing_checkpoint_is_an_error_where_one_is_named(tmp_path):
    with job(trainers=2) as (zero, one):
        one.fleet.save_persistables(tmp_path)
        one.fleet.save_inference_model(tmp_path)
        one.fleet.clean_redundant_check_points(tmp_path)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(CheckpointError, match="has no checkpoint"):
            zero.fleet.load_persistables(tmp_path)
        with pytest.raises(CheckpointError, match="has no checkpoint"):
            zero.fleet.load_check_point(tmp_path, ignore_empty=False)
        with pytest.raises(ConfigurationError, match="checkpoint_num is 0"):
            zero.fleet.clean_redundant_check_points(tmp_path, checkpoint_num=0)


def test_one_process_loads_what_was_exported(tmp_path):
    with job(servers=2) as (trainer,):
        trainer.train(2)
        trainer.fleet.save_inference_model(None, str(tmp_path), ["x"], ["loss"])
        expected = trainer.fleet.export_state_dict()
    single = build()
    single.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, value in single.state_dict().items():
        assert torch.equal(value, expected[name]), name
        assert torch.equal(value, trainer.model.state_dict()[name]), name
    # After stop_worker the module's own values are the last ones.
    assert torch.equal(trainer.fleet.export_state_dict()["0.weight"], expected["0.weight"])


def test_parameters_have_the_names_of_the_module_that_holds_them_where_the_script_gives_none():
    with job(named=False) as (trainer,):
        trainer.train(1)
        assert trainer.fleet.export_state_dict().keys() == trainer.model.state_dict().keys()
        told = {variable.name for variable in trainer.fleet.main_program.global_block().all_parameters()}
        assert told == dict(trainer.model.named_parameters()).keys()


def test_a_compiled_model_that_the_script_gives_has_the_names_of_the_model_in_it():
    model, compiled = build(), torch.nn.Module()
    compiled._orig_mod = model  # as torch.compile does, whose import takes long
    fleet = Fleet()
    fleet.init(UserDefinedRoleMaker(0, Role.WORKER, 1, ["127.0.0.1:6174"]))
    fleet.distributed_optimizer(torch.optim.SGD(compiled.parameters(), lr=0.1), model=compiled)
    found = [each.name for each in fleet.main_program.global_block().all_parameters()]
    assert found == [name for name, _ in model.named_parameters()]


def test_parameters_without_names_are_not_exported_and_the_log_and_the_error_say_how_they_get_names(
    monkeypatch, caplog
):
    monkeypatch.setattr(facade, "find_module", lambda _: None)  # as where two modules share an optimizer
    caplog.set_level("INFO", "fleet")
    with (
        job(named=False) as (trainer,),
        pytest.raises(ConfigurationError, match=r"distributed_optimizer\(optimizer, model=model\)"),
    ):
        trainer.fleet.export_state_dict()
    assert "model=model in fleet.distributed_optimizer" in caplog.text


def test_numbers_are_combined_over_the_trainers():
    with job(trainers=3) as trainers:

        def script(trainer: Trainer) -> list[Any]:
            fleet, index = trainer.fleet, trainer.fleet.worker_index()
            output = np.zeros(2)
            return [
                fleet.all_reduce_worker(np.array([index, 1.0]), output).tolist(),
                output.tolist(),
                int(fleet.all_reduce_worker(index, mode="max")),
                fleet.all_reduce_worker(torch.tensor([index + 5]), mode="min"),
            ]

        for found in at_once(*(lambda t=trainer: script(t) for trainer in trainers)):
            assert found == [[3.0, 3.0], [3.0, 3.0], 2, torch.tensor([5])]
        shares = [trainer.fleet.split_files([f"f{i}" for i in range(8)]) for trainer in trainers]
        assert shares == [["f0", "f1", "f2"], ["f3", "f4", "f5"], ["f6", "f7"]]


def test_a_trainer_that_takes_no_part_is_named_when_the_wait_has_lasted_too_long(monkeypatch):
    with job(trainers=2) as (zero, _):
        monkeypatch.setattr(
            Settings, "stalled_seconds", property(lambda _: 0.5)
        )  # not before all have joined
        expected = r"all_reduce_worker \(sum of <i8\[\]\) waited \d s for trainer 1"
        with pytest.raises(DeadlineExceededError, match=expected):
            zero.fleet.all_reduce_worker(1)


def test_the_program_form_saves_through_the_same_calls(tmp_path):
    (port,) = free_ports(1)
    endpoints = [f"127.0.0.1:{port}"]

    def distributed(kind: Any) -> tuple[Fleet, Any]:
        fleet, model = Fleet(), build()
        fleet.init(UserDefinedRoleMaker(0, kind, 1, endpoints))
        fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
        fleet.minimize(loss_fn)
        return fleet, model

    server, _ = distributed(Role.SERVER)
    serving = package.Executor()
    thread = threading.Thread(target=lambda: serving.run(server.main_program), daemon=True)
    thread.start()
    fleet, model = distributed(Role.WORKER)
    executor, program = package.Executor(), fleet.main_program
    executor.run(fleet.startup_program)
    executor.run(program, feed={"x": X})
    fleet.save_persistables(executor, str(tmp_path), program)
    with pytest.raises(ConfigurationError, match="main_program is not the one"):
        fleet.save_persistables(
            executor,
            str(tmp_path),
            package.Program.from_optimizer(torch.optim.SGD(build().parameters(), lr=1)),
        )
    assert fleet.step == 1
    assert torch.equal(fleet.export_state_dict()["2.bias"], model[2].bias)
    executor.close()
    thread.join(60)
    assert not thread.is_alive()
    assert (Path(tmp_path) / "manifest.json").is_file()


MODES: dict[str, Callable[[], package.DistributedStrategy]] = {
    "async": package.create_async_strategy,
    "half_async": package.create_half_async_strategy,
    "geo": lambda: package.create_geo_strategy(2),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_without_a_barrier_go_on_from_a_checkpoint_too(tmp_path, mode):
    (port, later) = free_ports(2)

    def replica(kind: Any, at: int) -> tuple[Fleet, Any, Any]:
        fleet, model = Fleet(), build()
        fleet.init(UserDefinedRoleMaker(0, kind, 1, [f"127.0.0.1:{at}"]))
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        return fleet, model, fleet.distributed_optimizer(adam, MODES[mode](), model=model)

    def run(at: int, script: Callable[[Fleet, Any, Any], None]) -> None:
        server, _, _ = replica(Role.SERVER, at)
        server.init_server()
        thread = threading.Thread(target=server.run_server, daemon=True)
        thread.start()
        fleet, model, optimizer = replica(Role.WORKER, at)
        fleet.init_worker()
        script(fleet, model, optimizer)
        fleet.stop_worker()
        thread.join(60)
        assert not thread.is_alive()

    def steps(model: Any, optimizer: Any, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss_fn(model, X).backward()
            optimizer.step()

    held: dict[str, torch.Tensor] = {}

    def first(fleet: Fleet, model: Any, optimizer: Any) -> None:
        steps(model, optimizer, 4)
        fleet.save_persistables(str(tmp_path))
        if mode == "async":  # in the others what has left may be on its way still
            held.update(fleet.export_state_dict())

    def second(fleet: Fleet, model: Any, optimizer: Any) -> None:
        assert fleet.load_persistables(str(tmp_path)).step == 4
        assert fleet.step == 4
        assert all(torch.equal(model.state_dict()[name], value) for name, value in held.items())
        steps(model, optimizer, 3)
        assert fleet.step == 7

    run(port, first)
    run(later, second)
