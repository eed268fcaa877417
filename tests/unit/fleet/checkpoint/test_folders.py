"""Folders of checkpoints: the newest complete one, what is removed, and the claims of writers."""

import contextlib
import errno
import logging
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.checkpoint import (
    Checkpoint,
    Claims,
    Manifest,
    Piece,
    commit,
    find_checkpoint,
    leave_mark,
    list_checkpoints,
    list_complete_numbers,
    list_numbers,
    removable_numbers,
    remove_numbers,
    tidy,
    write_shard,
    write_trainer_part,
    writer,
)
from fleet.checkpoint.export import write_model
from fleet.errors import CheckpointError, DiskFullError, FleetError
from fleet.role_maker import JobIdentity
from tests.support.descriptors import no_descriptor_left


def make(directory: Path, step: int) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "manifest.json").write_text(Manifest("aa", step, {}, ()).to_json())


def found_in(directory: Path) -> Path | None:
    found = find_checkpoint(directory)
    return found.directory if found is not None else None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with whole checkpoints 1, 2, 9 and 10, and what saves that never ended have left."""
    for number in (1, 2, 9, 10):
        make(tmp_path / f"checkpoint-{number}", number)
    for number in (5, 11):
        (tmp_path / f"checkpoint-{number}").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_the_newest_whole_one_counts_by_number_not_by_name(folder):
    assert list_numbers(folder) == [1, 2, 5, 9, 10, 11]
    assert found_in(folder) == folder / "checkpoint-10"
    assert found_in(folder / "checkpoint-2") == folder / "checkpoint-2"


@pytest.mark.parametrize(("step", "newest"), [(9, "checkpoint-10"), (11, ".")])
def test_one_in_the_folder_itself_counts_by_its_step(folder, step, newest):
    make(folder, step)
    assert found_in(folder) == folder / newest


def damage_in(folder: Path) -> list[str]:
    return [str(reason) for reason in list_checkpoints(folder)[1]]


def test_a_damaged_one_is_passed_over_unless_it_is_named_and_the_newest_whole_one_is_told_then(folder):
    broken = folder / "checkpoint-10"
    (broken / "manifest.json").write_text("{")
    assert found_in(folder) == folder / "checkpoint-9"
    (told,) = damage_in(folder)
    assert told.startswith(f"{broken}/manifest.json is truncated")
    with pytest.raises(CheckpointError, match="is truncated or not a manifest") as caught:
        find_checkpoint(broken)
    assert (
        f"The newest complete checkpoint of that folder is {folder}/checkpoint-9: load it, or {folder}"
        in str(caught.value)
    )


def test_where_none_is_whole_each_is_named(folder):
    for number in (1, 2, 9, 10):
        (folder / f"checkpoint-{number}" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(folder)
    assert str(caught.value).startswith(f"no checkpoint in {folder} is complete: ")
    for number in (1, 2, 9, 10):
        assert f"{folder}/checkpoint-{number}/manifest.json is truncated" in str(caught.value)


def make_socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)  # whose length is limited


INTRUDERS = {
    "directory": lambda path: path.mkdir(),
    "fifo": os.mkfifo,
    "socket": make_socket,
    "dangling-link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("intruder", INTRUDERS)
@pytest.mark.parametrize(
    "place", ["manifest.json", "shard-0-of-1-a1.safetensors", "trainer-a1.safetensors", ""]
)
def test_what_is_no_file_in_a_files_place_is_damage(tmp_path, place, intruder):
    for number in range(2):
        write(tmp_path / f"checkpoint-{number}", number, f"a{number}")
    path = tmp_path / "checkpoint-1" / place
    if place:
        path.unlink()
    else:
        shutil.rmtree(path)
    INTRUDERS[intruder](path)
    if place or intruder != "directory":  # a folder without a manifest is of a save that was cut short
        assert found_in(tmp_path) == tmp_path / "checkpoint-0"
        (told,) = damage_in(tmp_path)
        assert str(path) in told or f"{path.parent} is not a checkpoint: {path.name} cannot be read" in told
        expected = {"directory": "it is a directory", "fifo": "it is a FIFO", "socket": "it is a socket"}
        assert not place or expected.get(intruder, "No such file or directory") in told
    keep(tmp_path, 1)
    assert list_numbers(tmp_path)[:1] == [0]
    shutil.rmtree(tmp_path / "checkpoint-0")
    with pytest.raises(CheckpointError) if place or intruder != "directory" else contextlib.nullcontext():
        assert found_in(tmp_path) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize("intruder", INTRUDERS)
def test_what_is_no_file_where_one_was_neither_holds_a_save_up_nor_is_removed_as_ours(tmp_path, intruder):
    shard = write(tmp_path, 1, "a1")
    shard.unlink()
    INTRUDERS[intruder](shard)
    write(tmp_path, 2, "a2")
    tidy(tmp_path)
    assert found_in(tmp_path) == tmp_path
    assert shard.exists() is (intruder == "directory"), "a directory is somebody else's"
    manifest = tmp_path / "manifest.json"
    manifest.unlink()
    INTRUDERS[intruder](manifest)
    blocked = pytest.raises(DiskFullError, match=r"manifest\.json could not be written: .*Is a directory")
    with blocked if intruder == "directory" else contextlib.nullcontext():
        write(tmp_path, 3, "a3")


def keep(folder: Path, count: int) -> None:
    """Remove all but the newest complete ones, as a process that has all files does."""
    remove_numbers(
        folder, removable_numbers(list_numbers(folder), list_complete_numbers(folder, bool), count)
    )


def test_what_cannot_be_removed_is_named(folder, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.unlink", refuse)
    with pytest.raises(FleetError, match=r"checkpoint-1 could not be removed: .*Permission denied"):
        keep(folder, 1)


def test_where_there_is_none_none_is_found(folder, tmp_path):
    assert found_in(folder / "checkpoint-5") is None
    assert found_in(tmp_path / "nowhere") is None
    assert list_numbers(tmp_path / "nowhere") == []


@pytest.mark.parametrize("intruder", ["fifo", "socket", "dangling-link"])
def test_what_is_no_folder_is_not_taken_for_one_without_checkpoints(tmp_path, intruder):
    path = tmp_path / "checkpoints"
    INTRUDERS[intruder](path)
    with pytest.raises(CheckpointError, match="checkpoints cannot be searched for checkpoints"):
        find_checkpoint(path)


@pytest.mark.parametrize(("count", "kept"), [(1, [10, 11]), (2, [9, 10, 11]), (9, [1, 2, 9, 10, 11])])
def test_the_newest_stay_and_so_does_what_may_become_one(folder, count, kept):
    keep(folder, count)
    assert list_numbers(folder) == kept
    assert (folder / "notes").is_dir()
    assert (folder / "checkpoint-x").is_dir()


def test_a_number_that_no_save_gives_is_passed_over_by_name_and_is_never_counted_on(folder):
    beyond = folder / "checkpoint-9999999999999999999999999"
    make(beyond, 12)
    make(folder / "checkpoint-0099", 13)
    make(folder / "checkpoint-\u0661\u0662", 14)  # digits of another script
    assert list_numbers(folder) == [1, 2, 5, 9, 10, 11]
    assert found_in(folder) == folder / "checkpoint-10"
    assert [told.partition(";")[0] for told in damage_in(folder)] == [
        f"{path} has a number that no save assigns" for path in (folder / "checkpoint-0099", beyond)
    ]
    assert found_in(beyond) == beyond


def test_where_all_numbers_are_beyond_what_saves_give_the_error_names_one(tmp_path):
    make(tmp_path / "checkpoint-9999999999999999999999999", 12)
    with pytest.raises(CheckpointError, match=r"checkpoint-9{25} has a number that no save assigns"):
        find_checkpoint(tmp_path)


def test_a_manifest_of_any_depth_is_passed_over_for_the_one_before(folder):
    broken = folder / "checkpoint-10" / "manifest.json"
    broken.write_text('{"facts": ' + "[" * 200_000 + "]" * 200_000 + "}")
    assert found_in(folder) == folder / "checkpoint-9"
    (told,) = damage_in(folder)
    assert told.startswith(f"{broken} is truncated or not a manifest")


def write(directory: Path, step: int, save: str) -> Path:
    """Write a checkpoint with a shard and a trainer's part; return the shard's path."""
    shard = write_shard(directory, save, "0-of-1", [Piece("w", 0, 4, torch.ones(4))])
    part = write_trainer_part(directory, save, b"part")
    commit(directory, Manifest(save, step, {}, (shard, part), part.name).to_json())
    return directory / shard.name


def verified(folder: Path) -> list[int]:
    return list_complete_numbers(folder, lambda checkpoint: checkpoint.verify({}, [("w", 0, 4)]))


@pytest.mark.parametrize("spoilt", ["missing", "truncated", "changed", "no-part"])
def test_keep_counts_only_those_whose_files_are_as_they_were_written(tmp_path, spoilt):
    shards = [write(tmp_path / f"checkpoint-{number}", number, f"a{number}") for number in range(4)]
    match spoilt:
        case "missing":
            shards[3].unlink()
        case "truncated":
            shards[3].write_bytes(shards[3].read_bytes()[:-1])
        case "changed":
            shards[3].write_bytes(shards[3].read_bytes()[:-1] + b"x")
        case "no-part":
            (shards[3].parent / "trainer-a3.safetensors").unlink()
    assert verified(tmp_path) == [0, 1, 2]
    remove_numbers(tmp_path, removable_numbers(list_numbers(tmp_path), verified(tmp_path), 2))
    assert list_numbers(tmp_path) == [1, 2, 3]  # 3 may be about to become whole; 1 and 2 are


@pytest.mark.parametrize("gone", ["shard", "trainer"])
def test_a_file_that_the_manifest_names_and_that_is_gone_is_damage(tmp_path, gone):
    for number in range(2):
        write(tmp_path / f"checkpoint-{number}", number, f"a{number}")
    (path,) = (tmp_path / "checkpoint-1").glob(f"{gone}-*.safetensors")
    path.unlink()
    assert found_in(tmp_path) == tmp_path / "checkpoint-0"
    (told,) = damage_in(tmp_path)
    assert told.startswith(f"{path} cannot be read")


def test_cleaning_follows_no_link_and_removes_only_what_a_manifest_names(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere, 0, "ee")
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(1, 5):
        write(folder / f"checkpoint-{number}", number, f"a{number}")
    (folder / "checkpoint-0").symlink_to(elsewhere)
    of_others = folder / "checkpoint-2" / "shard-0-of-1-ffff.safetensors"  # named as ours, and by no manifest
    of_others.write_text("a user's")
    linked = folder / "checkpoint-3" / "trainer-a3.safetensors"
    kept = tmp_path / "kept"
    linked.rename(kept)
    linked.symlink_to(kept)
    keep(folder, 1)
    assert list_numbers(folder) == [0, 2, 4]
    assert [path.name for path in (folder / "checkpoint-2").iterdir()] == [of_others.name]
    assert kept.read_bytes() == b"part"
    assert len(list(elsewhere.iterdir())) == 5  # shard, part, what announced them, and the manifest


def test_a_manifest_that_is_a_link_or_was_changed_names_nothing(tmp_path):
    shards = [write(tmp_path / f"checkpoint-{number}", number, f"a{number}") for number in range(3)]
    first, second = shards[0].parent / "manifest.json", shards[1].parent / "manifest.json"
    first.rename(tmp_path / "moved.json")
    first.symlink_to(tmp_path / "moved.json")
    second.write_text(second.read_text().replace('"step": 1', '"step": 9'))
    for announced in tmp_path.rglob("*.begun"):
        announced.unlink()
    remove_numbers(tmp_path, [0, 1])
    assert shards[0].exists()
    assert shards[1].exists()
    assert first.is_symlink()


def test_what_a_save_that_was_cut_short_has_left_is_known_and_goes(tmp_path, monkeypatch):
    for number in (0, 2):
        write(tmp_path / f"checkpoint-{number}", number, f"a{number}")

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fleet.checkpoint.writer.write_tensors", dies)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "checkpoint-1", 1, "a1")
    (tmp_path / "checkpoint-1" / "shard-0-of-1-a1.safetensors.tmp").write_bytes(b"half")
    keep(tmp_path, 2)
    assert list_numbers(tmp_path) == [0, 2]


def test_every_file_gets_the_mode_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path / "checkpoint-0", 0, "a0")
        leave_mark({"FLEET_CHECKPOINT_DIR": str(tmp_path), "FLEET_JOB_UID": "u", "FLEET_LIFE": "0"}, {0})
        Claims("server-0", JobIdentity("j", "u", 0)).hold(tmp_path)
        write_model(tmp_path, {"w": torch.ones(1)}, {})
    finally:
        os.umask(before)
    files = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) == 8
    assert set(files.values()) == {"0o640"}, files


@contextlib.contextmanager
def killed_after(unlinked: int) -> Iterator[None]:
    """Have a process end once it has removed so many files."""
    unlink, left = os.unlink, [unlinked]

    def dies(*arguments: Any, **named: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        unlink(*arguments, **named)

    with (
        pytest.MonkeyPatch.context() as patched,
        contextlib.suppress(KeyboardInterrupt),
    ):
        patched.setattr(os, "unlink", dies)
        yield


@pytest.mark.parametrize("unlinked", range(4))
@pytest.mark.parametrize("tidied", [False, True], ids=["as-it-was-committed", "tidied"])
def test_what_a_killed_process_has_not_removed_goes_with_the_next(tmp_path, unlinked, tidied):
    for number in range(2):
        write(tmp_path / f"checkpoint-{number}", number, f"a{number}")
        if tidied:
            tidy(tmp_path / f"checkpoint-{number}")
    with killed_after(unlinked):
        remove_numbers(tmp_path, [0])
    assert found_in(tmp_path) == tmp_path / "checkpoint-1"
    keep(tmp_path, 1)
    assert list_numbers(tmp_path) == [1]


@pytest.mark.parametrize("unlinked", range(6))
def test_what_a_killed_process_has_left_of_a_save_before_goes_with_the_next(tmp_path, unlinked):
    write(tmp_path, 1, "a1")
    tidy(tmp_path)
    write(tmp_path, 2, "a2")
    with killed_after(unlinked):
        tidy(tmp_path)
    write(tmp_path, 3, "a3")
    assert Manifest.read(tmp_path, "manifest.replaced.json").save == "a2", "which is whole"
    tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "manifest.json",
        "shard-0-of-1-a3.safetensors",
        "trainer-a3.safetensors",
    ]


@pytest.mark.parametrize("unlinked", range(4))
def test_servers_that_remove_one_at_the_same_time_hinder_nobody(tmp_path, unlinked, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    folder = tmp_path / "checkpoint-0"
    write(folder, 0, "a0")
    tidy(folder)
    names_in = writer._names_in

    def and_another_removes(opened: int) -> list[str]:
        monkeypatch.undo()
        names = names_in(opened)
        with killed_after(unlinked):
            remove_numbers(tmp_path, [0])
        return names

    monkeypatch.setattr(writer, "_names_in", and_another_removes)
    remove_numbers(tmp_path, [0])
    assert "stays" not in caplog.text
    assert not folder.exists()


def test_why_a_folder_stays_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    write(tmp_path / "checkpoint-0", 0, "a0")
    (tmp_path / "checkpoint-0" / "notes.txt").write_text("a user's")
    (tmp_path / "checkpoint-1").symlink_to(tmp_path)
    remove_numbers(tmp_path, [0, 1])
    assert (
        "checkpoint-0 stays: it has files that no manifest of a checkpoint names, such as notes.t"
        in caplog.text
    )
    assert "checkpoint-1 stays: it is a link, or not a folder" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is open")
def test_where_no_descriptor_is_left_nothing_is_said_against_the_checkpoints(folder):
    """It is no mistake of the user's, after which nothing would be tried again."""
    with no_descriptor_left():
        for look in (found_in, Checkpoint):
            with pytest.raises(DiskFullError, match="Too many open files"):
                look(folder)


@pytest.mark.parametrize("reason", [errno.EMFILE, errno.ENFILE])
def test_one_that_no_descriptor_was_left_for_is_not_passed_over(folder, monkeypatch, reason):
    whole = os.open

    def refuse(path: Any, *given: Any, **named: Any) -> int:
        if str(path).endswith("checkpoint-10/manifest.json"):
            raise OSError(reason, os.strerror(reason))
        return whole(path, *given, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DiskFullError, match=r"checkpoint-10/manifest\.json could not be opened"):
        find_checkpoint(folder)
    with pytest.raises(DiskFullError):  # it may need another's rows
        remove_numbers(folder, [1, 2])
    assert list_numbers(folder) == [1, 2, 5, 9, 10, 11]


def claims(attempt: int = 0, uid: str = "u", writer: str = "server-0") -> Claims:
    return Claims(writer, JobIdentity("digits", uid, attempt))


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
    with pytest.raises(FleetError, match="each job needs its own folder"):
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
    with pytest.raises(FleetError, match="was not written"):
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
    with pytest.raises(FleetError, match="each job needs its own folder"):
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
    assert "is not a claim" in caplog.text
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
