"""Checkpoints of whole jobs, in one process over loopback: what is saved, and how training goes on."""

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.checkpoint import Checkpoint, Manifest, TrainStatus, find_checkpoint, write_shard
from fleet.errors import CheckpointError, ConfigurationError, FleetError, StateLostError
from fleet.parameter_server import keeper
from fleet.parameter_server.control_client import ControlClient, Pending
from fleet.parameter_server.keeper import Keeper
from fleet.parameter_server.modes import Geo, HalfAsync
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer import Trainer
from tests.support.parameter_server import Loopback, loopback, small_model
from tests.support.threads import at_once, one_torch_thread

BATCHES = torch.linspace(-1, 1, 20 * 3 * 20).reshape(20, 3, 20)

OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.001, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1),
}


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Equal to the bit is promised at one torch thread."""
    with one_torch_thread():
        yield


def loss_of(model: Any, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


def train(trainer: Trainer, model: Any, steps: range) -> None:
    for step in steps:
        model.zero_grad()
        loss_of(model, BATCHES[step]).backward()
        trainer.step()


def alone(optimizer_of: Any, steps: int) -> dict[str, torch.Tensor]:
    """Return what one process has after so many steps."""
    model = small_model()
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, BATCHES[step]).backward()
        optimizer.step()
    assert all(value.isfinite().all() for value in model.state_dict().values())
    return dict(model.state_dict())


def differing(model: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])]


def saved(directory: Path, steps: int, servers: int = 2, **arguments: Any) -> None:
    with loopback(servers=servers, **arguments) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        train(trainer, model, range(steps))
        trainer.save(str(directory), TrainStatus())
        trainer.complete()


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_and_ten_more_equal_twenty_to_the_bit(tmp_path, name, servers):
    optimizer = OPTIMIZERS[name]
    saved(tmp_path, 10, optimizer=optimizer)
    with loopback(tmp_path, servers=servers, optimizer=optimizer) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        assert trainer.current_step == 10
        assert differing(model, alone(optimizer, 10)) == []
        train(trainer, model, range(10, 20))
        assert trainer.current_step == 20
        assert differing(model, alone(optimizer, 20)) == []


def test_a_trainer_may_ask_the_servers_to_load_before_its_first_step(tmp_path):
    saved(tmp_path, 3)
    with loopback(servers=2, trainers=2) as job:
        (zero, model, _), (one, other, _) = job.make_trainer(0), job.make_trainer(1)
        at_once(zero.start, one.start)
        assert zero.current_step == 0
        at_once(lambda: zero.load(str(tmp_path)), lambda: one.load(str(tmp_path)))
        assert (zero.current_step, one.current_step) == (3, 3)
        at_once(lambda: train(zero, model, range(3, 5)), lambda: train(one, other, range(3, 5)))
        assert differing(model, dict(other.state_dict())) == []
        assert zero.current_step == 5


def test_a_restarted_trainer_that_loads_keeps_what_the_servers_have_learned_since(tmp_path):
    with loopback(servers=2) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        train(trainer, model, range(2))
        trainer.save(str(tmp_path), TrainStatus(epoch_no=4))
        train(trainer, model, range(2, 5))
        again, later, _ = job.make_trainer(attempt=1)
        again.start()
        status = again.load(str(tmp_path))
        assert status == TrainStatus(epoch_no=4, step=2)
        assert again.current_step == 5
        assert differing(later, dict(model.state_dict())) == []


def test_a_save_holds_one_step_although_another_trainer_is_ahead(tmp_path):
    with loopback(servers=2, trainers=2) as job:
        (zero, model, _), (one, other, _) = job.make_trainer(0), job.make_trainer(1)
        at_once(zero.start, one.start)
        at_once(lambda: train(zero, model, range(1)), lambda: train(one, other, range(1)))
        after_one = copy.deepcopy(dict(model.state_dict()))
        ahead = threading.Thread(target=train, args=(one, other, range(1, 2)), daemon=True)
        ahead.start()  # its gradients of the next step arrive before, during or after the save
        server = job.servers[0].server
        while not server.heartbeat(0, 0).waiting_for:
            pass
        zero.save(str(tmp_path), TrainStatus())
        train(zero, model, range(1, 2))
        ahead.join(10)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.manifest.step == 1
    for name, value in after_one.items():
        piece = checkpoint.piece(name, 0, value.numel(), tuple(value.shape))
        assert torch.equal(piece.value, value), name


def test_saving_between_backward_and_step_is_refused(tmp_path):
    with loopback() as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        loss_of(model, BATCHES[0]).backward()
        with pytest.raises(FleetError, match="a checkpoint was asked for"):
            trainer.save(str(tmp_path), TrainStatus())
    assert not list(tmp_path.iterdir())


def test_a_save_that_a_server_cannot_finish_names_it_and_leaves_the_one_before(tmp_path, monkeypatch):
    write = write_shard

    def full(directory: Path, save: str, shard: str, pieces: Any) -> Any:
        if shard == "1-of-2":
            raise FleetError(f"{directory}/shard-{shard} could not be written: no space left")
        return write(directory, save, shard, pieces)

    with loopback(servers=2) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        train(trainer, model, range(2))
        trainer.save(str(tmp_path), TrainStatus())
        train(trainer, model, range(2, 3))
        monkeypatch.setattr(keeper, "write_shard", full)
        with pytest.raises(FleetError, match=rf"{job.endpoints[1]}.*shard-1-of-2.*no space left"):
            trainer.save(str(tmp_path), TrainStatus())
        assert Checkpoint(tmp_path).manifest.step == 2
        monkeypatch.undo()
        trainer.save(str(tmp_path), TrainStatus())
    assert Checkpoint(tmp_path).manifest.step == 3
    kept = {file.name for file in Checkpoint(tmp_path).manifest.files} | {"manifest.json"}
    assert {path.name for path in tmp_path.iterdir()} == kept  # nothing of the others is left


def test_servers_that_begin_with_different_checkpoints_are_told_apart_at_join(tmp_path):
    saved(tmp_path / "a", 1)
    saved(tmp_path / "b", 2)
    job = Loopback(servers=2, settings=Settings(heartbeat_seconds=0.05, deadline_seconds=1.0))
    try:
        job.start_server(0, tmp_path / "a")
        job.start_server(1, tmp_path / "b")
        trainer, _, _ = job.make_trainer()
        with pytest.raises(StateLostError, match="have loaded different checkpoints") as caught:
            trainer.start()
        assert all(endpoint in str(caught.value) for endpoint in job.endpoints)
    finally:
        job.close()


@pytest.mark.parametrize("mode", [HalfAsync(send_queue_size=8), Geo(push_nums=8)], ids=lambda mode: mode.name)
def test_a_save_and_an_export_hold_the_steps_that_the_servers_do_not_have_yet(tmp_path, mode):
    with loopback(servers=2, mode=mode) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        before = copy.deepcopy(dict(model.state_dict()))
        train(trainer, model, range(3))
        trainer.save(str(tmp_path), TrainStatus())
        held = {name: value.clone() for name, value in model.state_dict().items()}
        assert Checkpoint(tmp_path).manifest.step == 3
        for name, value in held.items():
            piece = Checkpoint(tmp_path).piece(name, 0, value.numel(), tuple(value.shape))
            assert torch.allclose(piece.value, value, atol=1e-6), name
            assert not torch.equal(piece.value, before[name]), name
        train(trainer, model, range(3, 5))
        exported = trainer.export()
        assert all(
            torch.allclose(exported[name], value, atol=1e-6) for name, value in model.state_dict().items()
        )
        assert not torch.equal(exported["0.bias"], held["0.bias"])
    with loopback(tmp_path, servers=1, mode=mode) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        assert trainer.current_step == 3
        assert all(torch.allclose(value, held[name], atol=1e-6) for name, value in model.state_dict().items())


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(tmp_path, caplog):
    with loopback(servers=1) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        for step in range(2):
            train(trainer, model, range(step, step + 1))
            trainer.save_numbered(str(tmp_path), TrainStatus(step), keep=0)
    (shard,) = (tmp_path / "checkpoint-1").glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with loopback(tmp_path, servers=1) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        assert trainer.current_step == 1
    assert f"passed over a checkpoint: {shard} has the SHA-256" in caplog.text


def test_optimizer_state_of_trainers_and_of_servers_is_not_taken_for_each_other(tmp_path):
    adam = OPTIMIZERS["adam"]
    saved(tmp_path / "geo", 1, optimizer=adam, mode=Geo(1))
    saved(tmp_path / "sync", 1, optimizer=adam)
    for directory, mode, words in (
        ("geo", None, "state of the optimizer: nothing here, in the trainer's part there"),
        ("sync", Geo(1), "has the state of optimizers on the servers"),
    ):
        with pytest.raises(CheckpointError, match=words):
            Loopback(optimizer=adam, mode=mode).start_server(0, tmp_path / directory)


def test_a_restarted_trainer_gets_its_part_although_the_checkpoint_is_gone(tmp_path):
    with loopback(servers=1) as job:
        trainer, model, optimizer = job.make_trainer()
        trainer.start()
        optimizer.param_groups[0]["lr"] = 0.025
        trainer.save_numbered(str(tmp_path), TrainStatus(), keep=0)
    with loopback(tmp_path, servers=1) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        train(trainer, model, range(1))
        trainer.save_numbered(str(tmp_path), TrainStatus(), keep=1)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
        again, _, optimizer = job.make_trainer(attempt=1)
        again.start()
        assert optimizer.param_groups[0]["lr"] == 0.025


def test_a_sending_thread_that_meets_the_sessions_end_finds_its_servers():
    with loopback(servers=2) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        client = trainer.checkpoints._client
        client.close()
        for block in client.plan.blocks:
            client.send_gradient(block, memoryview(bytes(4)))
        with pytest.raises(FleetError, match="has ended"):
            client.check()


class Apart(Keeper):
    """Keeps what it writes in a directory of its server's own, as with a volume per replica."""

    def _apart(self, directory: str) -> str:
        return f"{directory}/{self._plan.server}" if directory else ""

    def save(self, directory: str, save: str, step: int, trainer_part: bytes) -> Any:
        return super().save(self._apart(directory), save, step, trainer_part)

    def commit(self, directory: str, manifest: str) -> None:
        super().commit(self._apart(directory), manifest)

    def tidy(self, directory: str) -> None:
        super().tidy(self._apart(directory))

    def load(self, directory: str, save: str = "") -> Any:
        return super().load(self._apart(directory), save)


@pytest.mark.parametrize("how", ["servers", "trainers"])
def test_servers_with_directories_of_their_own_go_on_from_the_newest_that_all_have(
    tmp_path, monkeypatch, how
):
    monkeypatch.setattr("fleet.parameter_server.server.Keeper", Apart)
    with loopback(servers=2, trainers=1) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        train(trainer, model, range(1))
        trainer.save(str(tmp_path), TrainStatus(epoch_no=1))
        expected = copy.deepcopy(dict(model.state_dict()))
        train(trainer, model, range(1, 2))

        def dead(*_: object) -> None:
            raise FleetError("the server died after its reply to Save")

        monkeypatch.setattr(job.servers[1].server.keeper, "commit", dead)
        with pytest.raises(FleetError, match="died after its reply"):
            trainer.save(str(tmp_path), TrainStatus(epoch_no=2))
    assert [Checkpoint(tmp_path / number).manifest.step for number in "01"] == [2, 1]
    at_start = tmp_path if how == "servers" else None
    with loopback(at_start, servers=2, trainers=2) as job:
        trainers = [job.make_trainer(index) for index in range(2)]
        at_once(*(trainer.start for trainer, _, _ in trainers))
        statuses = at_once(*(lambda one=one: one.load(str(tmp_path)) for one, _, _ in trainers))
        assert [status.epoch_no for status in statuses] == [1, 1]
        for trainer, model, _ in trainers:
            assert trainer.current_step == 1
            assert differing(model, expected) == []
        at_once(*(lambda one=one: train(one[0], one[1], range(1, 2)) for one in trainers))
        trainers[0][0].save(str(tmp_path), TrainStatus())
    assert {path.name for path in tmp_path.rglob("*.safetensors")} == {
        file.name for file in Checkpoint(tmp_path / "0").manifest.files
    }


def test_a_trainer_that_joins_while_another_has_the_servers_load_gets_one_checkpoint(tmp_path):
    saved(tmp_path, 3)
    with loopback(servers=2, trainers=2) as job:
        (zero, _, _), (one, model, _) = job.make_trainer(0), job.make_trainer(1)
        zero.start()
        first, second = (running.server for running in job.servers)
        join, loaded = second.join, threading.Event()

        def join_late(request: Any) -> Any:
            loaded.wait(10)
            return join(request)

        second.join = join_late  # type: ignore[method-assign]
        joining = threading.Thread(target=one.start, daemon=True)
        joining.start()
        while first._membership_attempt(1) < 0:
            pass
        zero.load(str(tmp_path))
        loaded.set()
        joining.join(10)
        assert one.current_step == zero.current_step == 3
        piece = Checkpoint(tmp_path).piece("0.bias", 0, 1000, (1000,))
        assert torch.equal(model[0].bias.detach(), piece.value)


def test_a_trainer_that_trains_on_values_from_before_a_load_is_told(tmp_path):
    saved(tmp_path, 3)
    with loopback(servers=2, trainers=2) as job:
        (zero, _, _), (one, other, _) = job.make_trainer(0), job.make_trainer(1)
        at_once(zero.start, one.start)
        zero.load(str(tmp_path))
        with pytest.raises(ConfigurationError, match="trainer 1 began a step with the values from before"):
            train(one, other, range(1))


def test_loading_once_another_trainer_has_begun_is_refused(tmp_path):
    saved(tmp_path, 3)
    with loopback(servers=1, trainers=2) as job:
        (zero, model, _), (one, other, _) = job.make_trainer(0), job.make_trainer(1)
        at_once(zero.start, one.start)
        ahead = threading.Thread(target=train, args=(one, other, range(1)), daemon=True)
        ahead.start()
        while not job.servers[0].server.heartbeat(0, 0).waiting_for:
            pass
        with pytest.raises(ConfigurationError, match="was not loaded: training has begun with other values"):
            zero.load(str(tmp_path))
        train(zero, model, range(1))
        ahead.join(10)


def test_a_commit_of_a_replaced_trainer_or_of_an_older_save_changes_nothing(tmp_path):
    with loopback() as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        client = trainer.checkpoints._client
        stale = Manifest("0badcafe", 0, {}, ()).to_json()
        trainer.save(str(tmp_path), TrainStatus())
        with pytest.raises(FleetError, match="another one came after it"):
            client.ask_all(lambda control, seconds: control.commit(str(tmp_path), stale, seconds))
        saved_name = Checkpoint(tmp_path).manifest.save
        again, _, _ = job.make_trainer(attempt=1)
        again.start()
        old = ControlClient(job.endpoints[0], 0, 0)
        manifest = (tmp_path / "manifest.json").read_text()
        calls: list[Pending[Any]] = [
            old.commit(str(tmp_path), manifest, 5.0),
            old.commit(str(tmp_path), "", 5.0),
            old.load(str(tmp_path), 5.0),
            old.checkpoints(str(tmp_path), 1, 5.0),
        ]
        for call in calls:
            with pytest.raises(ConfigurationError, match="has not joined, or was replaced"):
                call.result()
        old.close()
        (tmp_path / Checkpoint(tmp_path).manifest.files[0].name).unlink()
        with pytest.raises(FleetError, match=r"shard-0-of-1-.* is not as it was written"):
            again.checkpoints._client.ask_all(
                lambda control, seconds: control.commit(str(tmp_path), manifest, seconds)
            )
    assert Checkpoint(tmp_path).manifest.save == saved_name


def test_servers_at_different_steps_are_lost_state():
    with loopback(servers=2) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        trainer.checkpoints._client.pull(["", ""], [4, 5])
        assert trainer.current_step == 4
        with pytest.raises(StateLostError, match="are at the steps 4, 6"):
            trainer.checkpoints._client.pull(["", ""], [4, 6])


def test_a_wait_for_a_servers_reply_ends_with_the_sessions_failure(tmp_path, monkeypatch):
    released = threading.Event()
    with loopback() as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        client = trainer.checkpoints._client

        def hangs(*_: object) -> list[Any]:
            client.fail(FleetError("the other server vanished"))
            released.wait(20)
            return []

        monkeypatch.setattr(job.servers[0].server.keeper, "save", hangs)
        try:
            with pytest.raises(FleetError, match="the other server vanished"):
                trainer.save(str(tmp_path), TrainStatus())
            assert not released.is_set()
        finally:
            released.set()


def test_another_model_or_optimizer_is_refused_by_name(tmp_path):
    saved(tmp_path, 1)
    job = Loopback(optimizer=OPTIMIZERS["adam"])
    with pytest.raises(CheckpointError, match=r"another training: optimizer of param group 0: adam.* sgd"):
        job.start_server(0, tmp_path)


def test_buffers_learning_rate_and_the_scripts_state_come_back(tmp_path):
    def with_statistics() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(20, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    with loopback(model=with_statistics) as job:
        trainer, model, optimizer = job.make_trainer()
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
        trainer.start()
        for step in range(3):
            train(trainer, model, range(step, step + 1))
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what the distributed optimizer does
            scheduler.step()
        trainer.save(str(tmp_path), TrainStatus(3, state={"scheduler": scheduler.state_dict()}))
        expected = copy.deepcopy(dict(model.state_dict()))
    with loopback(tmp_path, model=with_statistics) as job:
        trainer, model, optimizer = job.make_trainer()
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
        trainer.start()
        status = trainer.load(str(tmp_path))
        assert status is not None
        scheduler.load_state_dict(dict(status.state["scheduler"]))
        assert (status.epoch_no, status.next(), status.step) == (3, 4, 3)
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert scheduler.last_epoch == 3
        assert int(model[1].num_batches_tracked) == 3
        assert differing(model, expected) == []


def test_numbered_checkpoints_are_counted_up_and_the_newest_are_kept(tmp_path):
    folder = str(tmp_path)
    with loopback(servers=2) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        for step in range(3):
            train(trainer, model, range(step, step + 1))
            assert trainer.save_numbered(folder, TrainStatus(step), keep=0) == step
        assert trainer.checkpoints.numbers(folder) == [0, 1, 2]
        assert trainer.checkpoints.numbers(folder, keep=2) == [1, 2]
        assert trainer.save_numbered(folder, TrainStatus(3), keep=1) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3"]
    newest = find_checkpoint(tmp_path)
    assert newest is not None
    assert newest.directory == tmp_path / "checkpoint-3"


def test_what_an_optimizer_has_loaded_before_the_first_step_goes_on_on_the_servers():
    make = OPTIMIZERS["adam"]
    model = small_model()
    before = make(model.parameters())
    for step in range(3):
        before.zero_grad()
        loss_of(model, BATCHES[step]).backward()
        before.step()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(before.state_dict())

    def trained() -> Any:
        loaded = small_model()
        loaded.load_state_dict(weights)
        return loaded

    def resumed(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        optimizer.load_state_dict(copy.deepcopy(state))
        return optimizer

    with loopback(servers=2, model=trained, optimizer=resumed) as job:
        fresh, _, _ = job.make_trainer(optimizer=make)
        with pytest.raises(ConfigurationError, match="state of the optimizer before the first step: of 6"):
            fresh.start()
        trainer, module, _ = job.make_trainer()
        trainer.start()
        train(trainer, module, range(3, 6))
        assert differing(module, alone(make, 6)) == []
