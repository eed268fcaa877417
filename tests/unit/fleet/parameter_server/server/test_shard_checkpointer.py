"""A server's checkpoints: trainer 0's part in chunks, and a replaced server that writes no more."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fleet.checkpoint import FileRecord, Manifest, Piece, find_checkpoint
from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.control.calls import CHUNK_BYTES
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.server.shard_checkpointer import PartTransfer, ShardCheckpointer
from fleet.parameter_server.server.shard_loader import ShardLoader
from fleet.parameter_server.store import FailedStep
from fleet.parameter_server.table_store import TableStore
from fleet.plan.tables import TablePlan
from fleet.role_maker import JobIdentity
from fleet.tables import TableConfig
from fleet.tables.rules import SGD


def test_a_part_is_joined_and_handed_over_once():
    parts = PartTransfer()
    parts.upload("a", 0, b"half ")
    parts.upload("a", 5, b"and half")
    assert parts.take_upload("a", 13) == b"half and half"
    with pytest.raises(FleetError, match="has 13 bytes, but 0 bytes of '' have arrived"):
        parts.take_upload("a", 13)
    assert parts.take_upload("b", 0) == b""


def test_another_save_has_nothing_of_the_one_before():
    parts = PartTransfer()
    parts.upload("a", 0, b"of a")
    parts.upload("b", 0, b"b")
    with pytest.raises(
        FleetError, match="part of the save 'a' has 4 bytes, but 1 bytes of 'b' have arrived; save again"
    ):
        parts.take_upload("a", 4)


@pytest.mark.parametrize(("save", "offset"), [("a", 3), ("a", 5), ("b", 4)])
def test_a_chunk_that_does_not_follow_is_refused(save, offset):
    parts = PartTransfer()
    parts.upload("a", 0, b"four")
    with pytest.raises(ConfigurationError, match="expected a chunk of 'a' at 4; save again"):
        parts.upload(save, offset, b"x")


def test_a_chunk_whose_reply_was_lost_may_be_repeated():
    parts = PartTransfer()
    for offset, data in ((0, b"half "), (0, b"half "), (5, b"and half"), (5, b"and half")):
        parts.upload("a", offset, data)
    assert parts.take_upload("a", 13) == b"half and half"


def test_each_trainer_downloads_what_was_offered_to_it_last():
    parts = PartTransfer()
    large = bytes(range(251)) * (CHUNK_BYTES // 251 + 7)
    assert parts.offer_download(0, large) == len(large)
    assert parts.offer_download(1, b"") == 0
    found = b""
    while data := parts.download(0, len(found)):
        assert len(data) <= CHUNK_BYTES
        found += data
    assert found == large
    assert parts.download(1, 0) == parts.download(2, 0) == b""


class Checkpointer(ShardCheckpointer):
    """A server with one parameter, and a trainer that has joined it as attempt 0."""

    def __init__(self, attempt: int = 0, value: float = 1.0, tables: tuple[TablePlan, ...] = ()) -> None:
        pieces = [Piece("w", 0, 1, torch.tensor([value]), {})]
        shard: Any = SimpleNamespace(
            plan=SimpleNamespace(server=0, endpoints=("a:1",), has_common_step=False, table_shards=()),
            blocks={},
            store=SimpleNamespace(snapshot=lambda: list(pieces)),
            tables=TableStore(tables, FailedStep("a:1")),
        )
        mode: Any = SimpleNamespace(step=3, step_of=lambda _: 3, missing=list)
        loader = ShardLoader(shard, mode, JobIdentity("digits", "u", attempt))
        membership = SimpleNamespace(joined=(0,), check_joined=self._check)
        super().__init__(shard, mode, loader, cast("Any", membership), threading.Condition())

    @staticmethod
    def _check(trainer: int, attempt: int) -> None:
        if attempt:
            raise ConfigurationError(f"trainer {trainer} has not joined")

    def manifest_of(self, directory: Path, save: str) -> str:
        """Begin a save, and return its manifest."""
        self.save(control_pb2.SaveRequest(directory=str(directory), save=save, step=3))
        files = self.written(control_pb2.WrittenRequest(save=save)).files
        return Manifest(save, 3, {}, tuple(map(FileRecord.from_json, files))).to_json()


def commit(checkpointer: Checkpointer, directory: Path, manifest: str) -> None:
    checkpointer.commit(control_pb2.CommitRequest(directory=str(directory), manifest=manifest))


def test_a_save_whose_reply_was_lost_may_be_repeated(tmp_path):
    checkpointer = Checkpointer()
    checkpointer.upload_part(control_pb2.PartRequest(save="aa", data=b"part"))
    request = control_pb2.SaveRequest(directory=str(tmp_path), save="aa", step=3, part_bytes=4)
    assert checkpointer.save(request) == checkpointer.save(request)
    assert len(checkpointer.written(control_pb2.WrittenRequest(save="aa")).files) == 2


def test_a_save_for_which_no_thread_can_be_started_leaves_tables_for_the_next_one(tmp_path, monkeypatch):
    config = TableConfig("t", 1, SGD())
    checkpointer = Checkpointer(tables=(TablePlan(0, config, 0, warm_start=lambda: ([7], [[1.0]])),))
    request = control_pb2.SaveRequest(directory=str(tmp_path), save="aa", step=3)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", _refuse)
        with pytest.raises(FleetError, match="save aa could not begin: can't start new thread; save again"):
            checkpointer.save(request)
    checkpointer.save(request)
    assert checkpointer.written(control_pb2.WrittenRequest(save="aa")).done


def _refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_survivors_save_that_has_begun_is_not_committed_and_removes_nothing(tmp_path):
    survivor, successor = Checkpointer(0, 1.0), Checkpointer(1, 2.0)
    first, second = tmp_path / "checkpoint-0", tmp_path / "checkpoint-1"
    begun = survivor.manifest_of(second, "aa")
    commit(successor, first, successor.manifest_of(first, "bb"))
    attempts = (
        lambda: commit(survivor, second, begun),
        lambda: commit(survivor, first, ""),
        lambda: survivor.numbers(control_pb2.CheckpointsRequest(directory=str(tmp_path), remove=[0])),
        lambda: survivor.manifest_of(second, "cc"),
    )
    for attempt in attempts:
        with pytest.raises(FleetError, match="has claimed"):
            attempt()
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert (found.directory, found.manifest.save) == (first, "bb")


@pytest.mark.parametrize(
    ("call", "request_of"),
    [
        ("save", control_pb2.SaveRequest),
        ("written", control_pb2.WrittenRequest),
        ("commit", control_pb2.CommitRequest),
        ("numbers", control_pb2.CheckpointsRequest),
        ("load", control_pb2.LoadRequest),
        ("upload_part", control_pb2.PartRequest),
        ("download_part", control_pb2.FoundPartRequest),
        ("set_status", control_pb2.StatusRequest),
        ("write", control_pb2.WriteRequest),
    ],
)
def test_a_trainer_that_has_not_joined_may_call_nothing(call, request_of):
    request = request_of(trainer=control_pb2.Trainer(id=0, attempt=1))
    with pytest.raises(ConfigurationError, match="trainer 0 has not joined"):
        getattr(Checkpointer(), call)(request)
