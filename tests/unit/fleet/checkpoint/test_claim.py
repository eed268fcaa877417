"""Claims: a process that was replaced writes, commits and removes nothing any more."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fleet.checkpoint import Claims, Manifest, Piece, find_checkpoint
from fleet.errors import DiskFullError, FleetError
from fleet.parameter_server.failed_step import FailedStep
from fleet.parameter_server.server.shard_checkpointer import Keeper
from fleet.parameter_server.table_store import TableStore
from fleet.role_maker import JobIdentity


def claims(attempt: int = 0, uid: str = "u", writer: str = "server-0") -> Claims:
    return Claims(writer, JobIdentity("digits", uid, attempt))


def keeper(attempt: int, value: float) -> Keeper:
    """Return the checkpoints of a server with one parameter, in a life of its job."""
    plan = SimpleNamespace(server=0, endpoints=("a:1",), mode=None, custom=None)
    piece = Piece("w", 0, 1, torch.tensor([value]), {})
    store = SimpleNamespace(snapshot=lambda: [piece])
    tables = TableStore((), FailedStep("a:1"))
    shard = SimpleNamespace(blocks={}, store=store, tables=tables, touched=False)
    mode = SimpleNamespace(step=3, missing=list)
    return Keeper(
        cast("Any", plan), cast("Any", shard), cast("Any", mode), JobIdentity("digits", "u", attempt)
    )


def manifest_of(keeper: Keeper, directory: Path, save: str) -> str:
    keeper.save(str(directory), save, 3, b"")
    written = keeper.written(save)
    assert written is not None
    return Manifest(save, 3, {}, tuple(written)).to_json()


def test_numbered_checkpoints_are_claimed_together_and_others_alone(tmp_path):
    claims().hold(tmp_path / "runs" / "checkpoint-3")
    claims().hold(tmp_path / "best")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.json"))] == [
        "best/claim-server-0.json",
        "runs/claim-server-0.json",
    ]


def test_a_later_life_takes_a_folder_over_and_the_earlier_one_is_told(tmp_path):
    earlier, later = claims(0), claims(1)
    earlier.hold(tmp_path)
    later.hold(tmp_path / "checkpoint-0")
    with pytest.raises(FleetError, match=r"server-0 of job digits \(u\) has claimed .* with attempt 1"):
        earlier.hold(tmp_path)
    later.hold(tmp_path)


def test_replicas_that_were_restarted_alone_write_side_by_side(tmp_path):
    restarted, other = claims(3), claims(0, writer="server-1")
    for each in (restarted, other, restarted, other):
        each.hold(tmp_path)


def test_another_job_takes_a_folder_over_once_and_for_good(tmp_path):
    deleted, new = claims(5, uid="deleted"), claims(0, uid="new")
    deleted.hold(tmp_path)
    new.hold(tmp_path)
    with pytest.raises(FleetError, match="each job needs a folder of its own"):
        deleted.hold(tmp_path)
    new.hold(tmp_path)


def test_a_process_outside_any_job_claims_nothing(tmp_path):
    claims(uid="").hold(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_looking_for_a_checkpoint_claims_only_where_the_job_has_written(tmp_path):
    earlier, later = claims(0), claims(1)
    later.renew(tmp_path)
    assert list(tmp_path.iterdir()) == [], "somebody else's checkpoints may lie there, to begin with"
    earlier.hold(tmp_path)
    claims(0, uid="other").renew(tmp_path)
    earlier.hold(tmp_path)
    later.renew(tmp_path)
    with pytest.raises(FleetError, match="is not written"):
        earlier.hold(tmp_path)


@pytest.mark.parametrize("refused", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_where_the_disk_refuses_a_claim_checkpoints_are_read_and_not_written(
    tmp_path, monkeypatch, caplog, refused
):
    def refuse(path: Path, _: bytes) -> int:
        raise OSError(refused, os.strerror(refused), str(path))

    earlier, later = claims(0), claims(1)
    earlier.hold(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    later.renew(tmp_path)
    assert f"checkpoints in {tmp_path} are read without a claim" in caplog.text
    with pytest.raises(
        DiskFullError if refused == errno.ENOSPC else FleetError, match="could not be written"
    ):
        later.hold(tmp_path / "checkpoint-0")
    monkeypatch.undo()
    claims(0, uid="other").hold(tmp_path)
    with pytest.raises(FleetError, match="each job needs a folder of its own"):
        later.hold(tmp_path)  # the folder was this job's when it was looked into


def test_a_claim_that_cannot_be_read_may_be_a_later_lifes(tmp_path, monkeypatch, caplog):
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    survivor, successor = claims(0), claims(1)
    survivor.hold(tmp_path)
    successor.hold(tmp_path)
    monkeypatch.setattr(os, "open", refuse)
    survivor.renew(tmp_path)
    assert "claim-server-0.json could not be read: [Errno 5] Input/output error" in caplog.text
    with pytest.raises(FleetError, match=r"could not be read: .*Input/output error; nothing is written"):
        survivor.hold(tmp_path)
    monkeypatch.undo()
    successor.hold(tmp_path)
    assert '"attempt": 1' in (tmp_path / "claim-server-0.json").read_text()


@pytest.mark.timeout(20)
def test_what_is_no_file_in_a_claims_place_hinders_no_reading_and_ends_nobody(tmp_path):
    path = tmp_path / "claim-server-0.json"
    os.mkfifo(path)
    claims().renew(tmp_path)
    claims().hold(tmp_path)
    assert path.is_file()
    path.unlink()
    path.mkdir()
    claims().renew(tmp_path)
    with pytest.raises(DiskFullError, match=r"claim-server-0\.json could not be written: .*Is a directory"):
        claims().hold(tmp_path)


def test_what_is_no_claim_is_replaced(tmp_path, caplog):
    (tmp_path / "claim-server-0.json").write_text('{"job": 1')
    claims().hold(tmp_path)
    assert "is no claim" in caplog.text
    claims().hold(tmp_path)
    assert len(caplog.records) == 1


def test_what_lives_killed_amid_a_claim_have_left_goes_with_a_later_claim(tmp_path):
    left, present = (tmp_path / f"claim-server-0.json.{name}.tmp" for name in ("0a1b2c3d", "4e5f6a7b"))
    of_another = tmp_path / "claim-server-1.json.0a1b2c3d.tmp"
    for path in (left, present, of_another):
        path.write_text("{")
    for path in (left, of_another):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 120))
    claims().hold(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"claim-server-0.json", present.name, of_another.name}, "one may just be written"


def test_a_survivors_save_that_has_begun_is_not_committed_and_removes_nothing(tmp_path):
    survivor, successor = keeper(0, 1.0), keeper(1, 2.0)
    folder, first, second = tmp_path, tmp_path / "checkpoint-0", tmp_path / "checkpoint-1"
    begun = manifest_of(survivor, second, "aa")
    successor.commit(str(first), manifest_of(successor, first, "bb"))
    attempts = (
        lambda: survivor.commit(str(second), begun),
        lambda: survivor.tidy(str(first)),
        lambda: survivor.remove(str(folder), [0]),
        lambda: survivor.save(str(second), "cc", 3, b""),
    )
    for attempt in attempts:
        with pytest.raises(FleetError, match="has claimed"):
            attempt()
    found = find_checkpoint(folder)
    assert found is not None
    assert (found.directory, found.manifest.save) == (first, "bb")
