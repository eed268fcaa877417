"""Checkpoints while servers and trainers die, stall and come too late, in one process over loopback."""

import copy
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.checkpoint import Checkpoint, Claims, Manifest, TrainStatus, write_shard
from fleet.errors import CheckpointError, ConfigurationError, FleetError, StateLostError
from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.modes import Async
from fleet.parameter_server.server import shard_checkpointer
from fleet.parameter_server.server.shard_checkpointer import ShardCheckpointer
from fleet.parameter_server.server.shard_loader import ShardLoader
from fleet.parameter_server.settings import Settings
from tests.support.checkpoints import differing, flip_a_bit, saved, train
from tests.support.full_disk import no_room_beyond
from tests.support.parameter_server import QUICK, Loopback, loopback
from tests.support.processes import wait_for
from tests.support.threads import at_once, one_torch_thread


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Equal to the bit is promised at one torch thread."""
    with one_torch_thread():
        yield


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
        monkeypatch.setattr(shard_checkpointer, "write_shard", full)
        with pytest.raises(FleetError, match=rf"{job.endpoints[1]}.*shard-1-of-2.*no space left"):
            trainer.save(str(tmp_path), TrainStatus())
        assert Checkpoint(tmp_path).manifest.step == 2
        monkeypatch.undo()
        trainer.save(str(tmp_path), TrainStatus())
    assert Checkpoint(tmp_path).manifest.step == 3
    kept = {file.name for file in Checkpoint(tmp_path).manifest.files} | {"manifest.json"}
    assert {
        path.name for path in tmp_path.iterdir() if not path.name.startswith("claim-")
    } == kept  # nothing of the others is left


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


def saved_after_each_step(folder: Path, saves: int) -> list[dict[str, torch.Tensor]]:
    """Have two trainers save after each step, as epoch 0 and so on; return the model as it was then."""
    states = []
    with loopback(servers=2, trainers=2) as job:
        (zero, model, _), (one, other, _) = job.make_trainer(0), job.make_trainer(1)
        at_once(zero.start, one.start)
        for epoch in range(saves):
            step = range(epoch, epoch + 1)
            at_once(lambda: train(zero, model, step), lambda: train(one, other, step))  # noqa: B023
            one.submit_status(TrainStatus(epoch, state={"of": 1}))
            zero.save_numbered(str(folder), TrainStatus(epoch, state={"of": 0}), keep=0)
            zero.checkpoints.wait()
            states.append(copy.deepcopy(dict(model.state_dict())))
    return states


def go_on(folder: Path, at_start: Path | None) -> tuple[list[TrainStatus | None], list[dict[str, Any]]]:
    """Have a job of two trainers go on, and make a step; return how it began."""
    with loopback(at_start, servers=2, trainers=2) as job:
        trainers = [job.make_trainer(index) for index in range(2)]
        at_once(*(trainer.start for trainer, _, _ in trainers))
        statuses = at_once(*(lambda one=one: one.load(str(folder)) for one, _, _ in trainers))
        states = [copy.deepcopy(dict(model.state_dict())) for _, model, _ in trainers]
        at_once(*(lambda one=one: train(one[0], one[1], range(5, 6)) for one in trainers))
        trainers[0][0].save(str(folder / "after"), TrainStatus())
    return statuses, states


def trainer_part_of(checkpoint: Path) -> Path:
    return checkpoint / Checkpoint(checkpoint).manifest.trainer_part


def alike(state: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in state.items())


@pytest.mark.parametrize("how", ["servers", "trainers"])
@pytest.mark.parametrize(
    ("name", "readers"),
    [
        pytest.param("shard-0-of-2-{save}.safetensors", 1, id="a-servers-part"),
        pytest.param("shard-1-of-2-{save}.safetensors", 1, id="another-servers-part"),
        pytest.param("trainer-{save}.safetensors", 2, id="trainer-0s-part"),
        pytest.param("trainer-1-{save}.safetensors", 2, id="another-trainers-part"),
        pytest.param("manifest.json", 2, id="the-manifest"),
    ],
)
def test_one_bit_costs_one_save_and_every_process_goes_on_from_the_one_before(
    tmp_path, caplog, name, readers, how
):
    before, _ = saved_after_each_step(tmp_path, 2)
    manifest = Checkpoint(tmp_path / "checkpoint-1").manifest
    path = tmp_path / "checkpoint-1" / name.format(save=manifest.save)
    if name == "manifest.json":
        path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
        found, expected = "its digest is", "expected"
    else:
        expected = next(file.sha256 for file in manifest.files if file.name == path.name)
        found = flip_a_bit(path)
    caplog.clear()
    statuses, states = go_on(tmp_path, tmp_path if how == "servers" else None)
    assert statuses == [TrainStatus(0, 1, {"of": 0}), TrainStatus(0, 1, {"of": 1})]
    assert all(alike(state, before) for state in states)
    warnings = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert len(warnings) == readers, "each server says once what it has found"
    for warning in warnings:
        assert warning.startswith(f"skipped a damaged checkpoint: {path} ")
        assert found in warning
        assert expected in warning
        assert warning.endswith(f". Training continues from {tmp_path}/checkpoint-0")


def test_all_damaged_files_of_a_save_are_named_in_one_warning(tmp_path, caplog):
    saved_after_each_step(tmp_path, 2)
    paths = [*(tmp_path / "checkpoint-1").glob("*.safetensors")]
    digests = {str(path): flip_a_bit(path) for path in paths}
    caplog.clear()
    go_on(tmp_path, tmp_path)
    warnings = [text for record in caplog.records if "skipped a damaged" in (text := record.getMessage())]
    assert len(warnings) == 2
    for server, warning in enumerate(warnings):
        of_this = {path for path in digests if "shard-" not in path or f"shard-{server}" in path}
        assert {path for path in digests if path in warning} == of_this
        assert all(f"{path} has the SHA-256 {digests[path]}, expected" in warning for path in of_this)


@pytest.mark.parametrize("how", ["servers", "trainers"])
def test_where_each_server_misses_another_save_all_go_on_from_the_newest_that_is_whole(tmp_path, how):
    whole, *_ = saved_after_each_step(tmp_path, 3)
    for number, server in ((2, 0), (1, 1)):
        (path,) = (tmp_path / f"checkpoint-{number}").glob(f"shard-{server}-*.safetensors")
        flip_a_bit(path)
    statuses, states = go_on(tmp_path, tmp_path if how == "servers" else None)
    assert [status.epoch_no for status in statuses if status is not None] == [0, 0]
    assert all(alike(state, whole) for state in states)


def test_without_a_whole_save_no_server_begins(tmp_path):
    saved_after_each_step(tmp_path, 2)
    digests = [flip_a_bit(trainer_part_of(path)) for path in tmp_path.glob("checkpoint-*")]
    with pytest.raises(CheckpointError) as caught, loopback(tmp_path, servers=2):
        pass
    assert str(caught.value).startswith(f"no checkpoint in {tmp_path} is complete: ")
    assert all(digest in str(caught.value) for digest in digests)
    with loopback(servers=2) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        with pytest.raises(ConfigurationError, match=r"no checkpoint in .* is complete"):
            trainer.load(str(tmp_path))


def test_a_save_that_was_named_is_an_error_which_names_the_newest_whole_one(tmp_path):
    saved_after_each_step(tmp_path, 3)
    for number in (1, 2):
        path = trainer_part_of(tmp_path / f"checkpoint-{number}")
        digest = flip_a_bit(path)
    with pytest.raises(CheckpointError) as caught, loopback(tmp_path / "checkpoint-2", servers=2):
        pass
    assert f"{path} has the SHA-256 {digest}, expected " in str(caught.value)
    assert str(caught.value).endswith(
        f"The newest complete checkpoint of that folder is {tmp_path}/checkpoint-0: load it, or {tmp_path}"
    )


@pytest.mark.parametrize("whole", [2, 1, 0])
def test_a_trainer_that_comes_back_gets_the_newest_status_that_is_whole(tmp_path, caplog, whole):
    saved_after_each_step(tmp_path / "first", 1)
    with loopback(tmp_path / "first" if whole == 1 else None, servers=2, trainers=1) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        for epoch in range(1, 4 if whole == 2 else 2):
            train(trainer, model, range(epoch, epoch + 1))
            trainer.save_numbered(str(tmp_path / "own"), TrainStatus(epoch), keep=0)
            trainer.checkpoints.wait()
        path = trainer_part_of(max((tmp_path / "own").glob("checkpoint-*")))
        flip_a_bit(path)
        train(trainer, model, range(5, 6))
        for attempt in (1, 2):
            again, other, _ = job.make_trainer(attempt=attempt)
            again.start()
            if not whole:
                with pytest.raises(ConfigurationError, match=f"{path} has the SHA-256"):
                    again.load(str(tmp_path / "own"))
                continue
            status = again.load(str(tmp_path / "own"))
            assert status is not None
            assert status.epoch_no == (2 if whole == 2 else 0)
            assert alike(dict(other.state_dict()), dict(model.state_dict())), "the servers' values stay"
            assert again.current_step == trainer.current_step
    assert caplog.text.count(f"skipped a damaged checkpoint: {path} has") == (2 if whole else 0)


def test_a_server_that_comes_back_on_a_full_disk_reads_first_and_claims_when_there_is_room(tmp_path, caplog):
    saved(tmp_path / "checkpoint-0", 2, servers=1)
    job = Loopback(settings=replace(QUICK, transport="tcp"))  # memory that is shared is a file, too
    job.job = replace(job.job, attempt=1)
    claim, survivor = tmp_path / "claim-server-0.json", Claims("server-0", replace(job.job, attempt=0))
    try:
        with no_room_beyond(16):
            job.start_server(0, tmp_path)
        assert f"checkpoints in {tmp_path} are read without a claim of this process: {claim}" in caplog.text
        trainer, model, _ = job.make_trainer()
        trainer.start()
        assert trainer.current_step == 2
        with no_room_beyond(16):
            train(trainer, model, range(2, 3))
            trainer.save_numbered(str(tmp_path), TrainStatus(), keep=0)
            trainer.checkpoints.wait()
        assert "there is no room for a checkpoint: parameter server" in caplog.text
        assert not (tmp_path / "checkpoint-1").exists(), "nothing is written without a claim"
        assert json.loads(claim.read_text())["attempt"] == 0
        trainer.save_numbered(str(tmp_path), TrainStatus(), keep=0)
        trainer.checkpoints.wait()
        assert Checkpoint(tmp_path / "checkpoint-1").manifest.step == 3
        assert json.loads(claim.read_text())["attempt"] == 1
        with pytest.raises(FleetError, match=r"has claimed .* with attempt 1"):
            survivor.hold(tmp_path)
    finally:
        job.close()


def test_a_restarted_trainer_gets_its_part_although_the_checkpoint_is_gone(tmp_path):
    with loopback(servers=1) as job:
        trainer, model, optimizer = job.make_trainer()
        trainer.start()
        optimizer.param_groups[0]["lr"] = 0.025
        trainer.save_numbered(str(tmp_path), TrainStatus(), keep=0)
        trainer.checkpoints.wait()
    with loopback(tmp_path, servers=1) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        train(trainer, model, range(1))
        trainer.save_numbered(str(tmp_path), TrainStatus(), keep=1)
        trainer.checkpoints.wait()
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
        again, _, optimizer = job.make_trainer(attempt=1)
        again.start()
        assert optimizer.param_groups[0]["lr"] == 0.025


def test_a_sending_thread_that_meets_the_sessions_end_finds_its_servers():
    with loopback(servers=2) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        client = trainer.session
        client.close()
        for block in client.plan.blocks:
            client.send_gradient(block, memoryview(bytes(4)))
        with pytest.raises(FleetError, match="has ended"):
            client.check()


class OwnDirectory(ShardCheckpointer):
    """Writes to a directory of the server's own, as with a volume per replica."""

    def save(self, request: Any) -> Any:
        request.directory += f"/{self._shard.plan.server}"
        return super().save(request)

    def commit(self, request: Any) -> Any:
        request.directory += f"/{self._shard.plan.server}"
        return super().commit(request)


class OwnDirectoryLoader(ShardLoader):
    """Reads from it."""

    def load(self, directory: str, save: str = "") -> Any:
        return super().load(f"{directory}/{self._shard.plan.server}" if directory else "", save)


@pytest.mark.parametrize("how", ["servers", "trainers"])
def test_servers_with_directories_of_their_own_go_on_from_the_newest_that_all_have(
    tmp_path, monkeypatch, how
):
    monkeypatch.setattr("fleet.parameter_server.server.server.ShardCheckpointer", OwnDirectory)
    monkeypatch.setattr("fleet.parameter_server.server.server.ShardLoader", OwnDirectoryLoader)
    with loopback(servers=2, trainers=1) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        train(trainer, model, range(1))
        trainer.save(str(tmp_path), TrainStatus(epoch_no=1))
        expected = copy.deepcopy(dict(model.state_dict()))
        train(trainer, model, range(1, 2))

        def dead(*_: object) -> None:
            raise FleetError("the server died after its reply to Save")

        monkeypatch.setattr(job.servers[1].server.checkpoints, "commit", dead)
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
        while first._trainers.membership.attempt(1) < 0:
            pass
        zero.load(str(tmp_path))
        loaded.set()
        joining.join(60)
        assert one.current_step == zero.current_step == 3
        piece = Checkpoint(tmp_path).piece("0.bias", 0, 1000, (1000,))
        assert torch.equal(model[0].bias.detach(), piece.value)


def test_a_trainer_that_trains_on_values_from_before_a_load_is_told(tmp_path):
    saved(tmp_path, 3)
    with loopback(servers=2, trainers=2) as job:
        (zero, _, _), (one, other, _) = job.make_trainer(0), job.make_trainer(1)
        at_once(zero.start, one.start)
        zero.load(str(tmp_path))
        with pytest.raises(ConfigurationError, match="trainer 1 began a step with values from before"):
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
        with pytest.raises(ConfigurationError, match="was not loaded, because training has begun with other"):
            zero.load(str(tmp_path))
        train(zero, model, range(1))
        ahead.join(60)


class SlowDisk:
    """Lets the first server read a checkpoint only when told to."""

    def __init__(self, job: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = threading.Event()
        self.may_go_on = threading.Event()
        loader = job.servers[0].server.loader
        read = loader._read

        def slowly(checkpoint: Checkpoint) -> Any:
            self.reads.set()
            assert self.may_go_on.wait(60)
            return read(checkpoint)

        monkeypatch.setattr(loader, "_read", slowly)


def test_a_trainer_may_join_while_a_server_reads_a_checkpoint(tmp_path, monkeypatch):
    saved(tmp_path, 3)
    with loopback(servers=1, trainers=2) as job:
        (zero, _, _), (one, _, _) = job.make_trainer(0), job.make_trainer(1)
        zero.start()
        disk = SlowDisk(job, monkeypatch)
        loading = threading.Thread(target=zero.load, args=(str(tmp_path),), daemon=True)
        loading.start()
        assert disk.reads.wait(60)
        one.start()
        disk.may_go_on.set()
        loading.join(60)
        assert one.load(str(tmp_path)) is not None
        assert (zero.current_step, one.current_step) == (3, 3)


def test_a_step_that_begins_while_a_server_reads_a_checkpoint_is_not_made_on_other_values(
    tmp_path, monkeypatch
):
    saved(tmp_path, 3)
    with loopback(servers=1, trainers=2) as job:
        (zero, model, _), (one, other, _) = job.make_trainer(0), job.make_trainer(1)
        at_once(zero.start, one.start)
        disk = SlowDisk(job, monkeypatch)

        ahead = threading.Thread(target=train, args=(one, other, range(1)), daemon=True)

        def train_meanwhile() -> None:
            assert disk.reads.wait(60)
            ahead.start()
            wait_for(lambda: job.servers[0].server.heartbeat(0, 0).waiting_for, "a gradient of trainer 1")
            disk.may_go_on.set()

        def load_in_vain() -> None:
            with pytest.raises(ConfigurationError, match="was not loaded, because training has begun"):
                zero.load(str(tmp_path))

        at_once(train_meanwhile, load_in_vain)
        train(zero, model, range(1))
        ahead.join(60)
        assert (zero.current_step, one.current_step) == (1, 1)


def test_a_commit_of_a_replaced_trainer_or_of_an_older_save_changes_nothing(tmp_path):
    with loopback() as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        client = trainer.session
        stale = Manifest("0badcafe", 0, {}, ()).to_json()
        trainer.save(str(tmp_path), TrainStatus())
        with pytest.raises(FleetError, match="another save has begun since"):
            client.calls.ask_all(
                lambda control, seconds: control.checkpoints.commit(str(tmp_path), stale, seconds)
            )
        saved_name = Checkpoint(tmp_path).manifest.save
        again, _, _ = job.make_trainer(attempt=1)
        again.start()
        old = ControlClient(job.endpoints[0], 0, 0)
        manifest = (tmp_path / "manifest.json").read_text()
        calls: list[Any] = [
            old.checkpoints.commit(str(tmp_path), manifest, 5.0),
            old.checkpoints.commit(str(tmp_path), "", 5.0),
            old.checkpoints.load(str(tmp_path), 5.0),
            old.checkpoints.numbers(str(tmp_path), 5.0, remove=[1]),
        ]
        for call in calls:
            with pytest.raises(ConfigurationError, match="has not joined, or was replaced"):
                call.result()
        old.close()
        (tmp_path / Checkpoint(tmp_path).manifest.files[0].name).unlink()
        with pytest.raises(FleetError, match=r"shard-0-of-1-.* is not as it was written"):
            again.session.calls.ask_all(
                lambda control, seconds: control.checkpoints.commit(str(tmp_path), manifest, seconds)
            )
    assert Checkpoint(tmp_path).manifest.save == saved_name


def test_servers_at_different_steps_are_lost_state():
    with loopback(servers=2) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        trainer.session.pull(["", ""], [0, 1])
        assert trainer.current_step == 0
        with pytest.raises(StateLostError, match="are at the steps 0, 2"):
            trainer.session.pull(["", ""], [0, 2])
        with pytest.raises(
            StateLostError, match=r"at step 4, but this server is at step 0 and no longer has"
        ):
            trainer.session.pull(["", ""], [4, 5])


def test_a_wait_for_a_servers_reply_ends_with_the_sessions_failure(tmp_path, monkeypatch):
    released = threading.Event()
    with loopback() as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        client = trainer.session

        def hangs(_: object) -> control_pb2.SaveReply:
            client.fail(FleetError("the other server vanished"))
            released.wait(20)
            return control_pb2.SaveReply()

        monkeypatch.setattr(job.servers[0].server.checkpoints, "save", hangs)
        try:
            with pytest.raises(FleetError, match="the other server vanished"):
                trainer.save(str(tmp_path), TrainStatus())
            assert not released.is_set()
        finally:
            released.set()


@pytest.mark.parametrize("between", ["snapshot", "commit"])
def test_what_a_failed_step_has_left_is_not_saved(tmp_path, monkeypatch, between):
    """The step fails before the copies are made, or once they are written and not committed yet."""
    settings = Settings(heartbeat_seconds=5.0, deadline_seconds=10.0)  # no heartbeat tells of it first
    with loopback(mode=Async(), settings=settings) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        trainer.save(str(tmp_path), TrainStatus(epoch_no=1))
        before = Checkpoint(tmp_path).manifest
        server = job.servers[0].server
        owner = server._shard.store if between == "snapshot" else server.checkpoints
        go_on = getattr(owner, between)

        def after_a_failure(*arguments: Any) -> Any:
            server._shard.store.failed.note(ArithmeticError("out of range"))
            return go_on(*arguments)

        monkeypatch.setattr(owner, between, after_a_failure)
        with pytest.raises(FleetError, match="could not be stepped: ArithmeticError: out of range"):
            trainer.save(str(tmp_path), TrainStatus(epoch_no=2))
        job.servers[0].join()
    assert Checkpoint(tmp_path).manifest == before
