"""Checkpoints that are written while training goes on: what becomes of those that take long or fail."""

import contextlib
import copy
import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.checkpoint import Checkpoint, TrainStatus, find_checkpoint, write_shard
from fleet.errors import DiskFullError, FleetError
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.modes import Async
from fleet.parameter_server.server import shard_checkpointer
from fleet.parameter_server.server.shard_checkpointer import ShardCheckpointer
from fleet.parameter_server.settings import Settings
from fleet.process.resources import for_saves
from tests.support.checkpoints import differing, train
from tests.support.descriptors import no_descriptor_left
from tests.support.parameter_server import loopback
from tests.support.replicas import job
from tests.support.threads import one_torch_thread


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Equal to the bit is promised at one torch thread."""
    with one_torch_thread():
        yield


class SlowWrites:
    """Lets servers write their shards only when told to, and notes the threads that do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        self.begun = threading.Event()

        def slowly(*arguments: Any) -> Any:
            self.begun.set()
            assert self.may_go_on.wait(60)
            return write_shard(*arguments)

        monkeypatch.setattr(shard_checkpointer, "write_shard", slowly)


@pytest.mark.parametrize("mode", [None, Async()], ids=["sync", "async"])
def test_training_goes_on_while_a_checkpoint_is_written_and_the_copy_stays_as_it_was(
    tmp_path, monkeypatch, mode
):
    disk = SlowWrites(monkeypatch)
    with loopback(servers=2, **({"mode": mode} if mode else {})) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        train(trainer, model, range(2))
        before = copy.deepcopy(dict(model.state_dict()))
        trainer.save_numbered(str(tmp_path), TrainStatus(0), keep=0)
        assert disk.begun.wait(60)
        train(trainer, model, range(2, 6))  # the disk has not moved yet
        assert trainer.current_step == 6
        assert not list(tmp_path.rglob("manifest.json"))  # nothing counts as saved
        disk.may_go_on.set()
        trainer.checkpoints.wait()
    with loopback(tmp_path, servers=2, **({"mode": mode} if mode else {})) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        assert trainer.current_step == 2
        assert differing(model, before) == []


def test_the_end_of_training_waits_for_the_last_checkpoint(tmp_path, monkeypatch):
    disk = SlowWrites(monkeypatch)
    with loopback() as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        train(trainer, model, range(1))
        trainer.save_numbered(str(tmp_path), TrainStatus(), keep=0)
        ends = threading.Thread(target=trainer.complete, daemon=True)
        ends.start()
        assert disk.begun.wait(60)
        assert not trainer.completed
        disk.may_go_on.set()
        ends.join(60)
        assert trainer.completed
    assert Checkpoint(tmp_path / "checkpoint-0").manifest.step == 1


def test_a_full_disk_pauses_saving_with_a_warning_and_ends_nobody(tmp_path, monkeypatch, caplog):
    full = threading.Event()
    write = os.write

    def refuse(descriptor: int, data: Any) -> int:
        if full.is_set() and "shard-1-of-2" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", refuse)
    caplog.set_level("INFO", "fleet.checkpoint")
    with loopback(servers=2) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        trainer.save_numbered(str(tmp_path), TrainStatus(), keep=0)
        trainer.checkpoints.wait()
        full.set()
        for step in range(2):
            train(trainer, model, range(step, step + 1))
            trainer.save_numbered(str(tmp_path), TrainStatus(), keep=1)
            trainer.checkpoints.wait()
            # What the other server had written is given back, and the one before is there.
            assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-0"]
        trainer.save(str(tmp_path / "own"), TrainStatus())
        assert f"there is no room for a checkpoint: parameter server {job.endpoints[1]}" in caplog.text
        full.clear()
        trainer.save_numbered(str(tmp_path), TrainStatus(), keep=1)
        trainer.complete()
    assert "there is room for checkpoints again" in caplog.text
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert Checkpoint(tmp_path / "checkpoint-1").manifest.step == 2


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is open")
@pytest.mark.parametrize("kept", [False, True], ids=["none-is-kept", "some-are-kept-for-saves"])
def test_a_process_without_descriptors_pauses_saving_unless_some_are_kept(tmp_path, caplog, kept):
    caplog.set_level("INFO", "fleet.checkpoint")
    weight = torch.nn.Parameter(torch.ones(1))
    weight.sum().backward()  # torch opens files of its own at the first step of a process
    torch.optim.SGD([weight]).step()
    with loopback() as job, contextlib.ExitStack() as afterwards:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        if kept:
            afterwards.callback(for_saves.give_up)
            for_saves.keep()
        with no_descriptor_left():
            for step in range(3):
                train(trainer, model, range(step, step + 1))
                trainer.save_numbered(str(tmp_path), TrainStatus(), keep=0)
                trainer.checkpoints.wait()
            trainer.save(str(tmp_path / "own"), TrainStatus())
        assert ("there is no room for a checkpoint" in caplog.text) is not kept
        assert ("Too many open files" in caplog.text) is not kept
        found = sorted(path.parent.name for path in tmp_path.rglob("manifest.json"))
        assert found == (["checkpoint-0", "checkpoint-1", "checkpoint-2", "own"] if kept else [])
        trainer.save_numbered(str(tmp_path), TrainStatus(), keep=1)
        trainer.complete()
    assert ("there is room for checkpoints again" in caplog.text) is not kept
    (last,) = tmp_path.glob("checkpoint-*")
    assert Checkpoint(last).manifest.step == 3


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is open")
def test_a_process_without_descriptors_loads_by_those_that_are_kept(tmp_path):
    with loopback() as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        train(trainer, model, range(2))
        trainer.save_numbered(str(tmp_path), TrainStatus(), keep=0)
        trainer.complete()
    with loopback() as job, contextlib.ExitStack() as afterwards:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        afterwards.callback(for_saves.give_up)
        for_saves.keep()
        with no_descriptor_left():
            assert trainer.load(str(tmp_path)) is not None
        assert trainer.current_step == 2
        trainer.complete()


def test_training_that_ends_without_its_last_checkpoint_says_so(tmp_path, monkeypatch, caplog):
    def full(*_: Any) -> Any:
        raise DiskFullError("no room")

    monkeypatch.setattr(shard_checkpointer, "write_shard", full)
    with loopback() as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        trainer.save_numbered(str(tmp_path), TrainStatus(), keep=0)
        trainer.complete()
    assert f"training ends without its last checkpoint: there was no room for {tmp_path}" in caplog.text


def test_a_server_whose_disk_hangs_is_named_and_not_waited_for_without_end(tmp_path, monkeypatch):
    def hangs(*_: Any) -> control_pb2.WrittenReply:
        return control_pb2.WrittenReply()

    monkeypatch.setattr(ShardCheckpointer, "written", hangs)
    settings = Settings(heartbeat_seconds=0.05, deadline_seconds=0.5)
    with loopback(settings=settings) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        trainer.save_numbered(str(tmp_path), TrainStatus(), keep=0)
        with pytest.raises(FleetError, match=r"127\.0\.0\.1:\d+ answers calls, but .*; check its disk"):
            trainer.complete()


def test_what_fails_in_the_background_for_another_reason_is_raised_at_the_next_call(tmp_path, monkeypatch):
    def refused(*_: Any) -> Any:
        raise FleetError("the disk is read-only now")

    monkeypatch.setattr(shard_checkpointer, "write_shard", refused)
    with loopback() as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        trainer.save_numbered(str(tmp_path), TrainStatus(), keep=0)
        with pytest.raises(FleetError, match="read-only now"):
            trainer.complete()


def test_a_script_that_saves_and_just_ends_has_its_checkpoint(tmp_path):
    """What `save_check_point` leaves to be written is not lost without stop_worker() either."""
    script, folder = Path(__file__).parent / "scripts" / "saves_and_ends.py", tmp_path / "checkpoints"
    with job(tmp_path, servers=2, trainers=1) as running:
        _, (trainer,) = running.start(script, str(folder))
        trainer.expect(0, "saved, it seems; the end", "without fleet.stop_worker()", seconds=120)
        found = find_checkpoint(folder)
        assert found is not None
        assert found.manifest.step == 1
        found.verify({}, [("weight", 0, 2_000_000), ("bias", 0, 2000)])
