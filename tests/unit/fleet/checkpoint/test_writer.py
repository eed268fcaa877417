"""Writing: what cannot be written leaves what was there, and says which file and why."""

import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fleet.checkpoint import Manifest, Piece, commit, tidy, write_shard
from fleet.errors import DiskFullError, FleetError


def test_a_disk_that_refuses_is_named_with_the_file(tmp_path):
    (tmp_path / "in the way").write_text("")
    with pytest.raises(FleetError, match=r"in the way/shard-0-of-1-aa.safetensors could not be written"):
        write_shard(tmp_path / "in the way", "aa", "0-of-1", [Piece("w", 0, 1, torch.ones(1))])


def test_a_write_that_breaks_off_leaves_no_file_under_the_name(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FleetError, match="No space left on device"):
        write_shard(tmp_path, "aa", "0-of-1", [Piece("w", 0, 1, torch.ones(1))])
    assert list(tmp_path.iterdir()) == []


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        calls.append("fsync")
        fsync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        calls.append(f"rename {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_rename)
    file = write_shard(tmp_path, "aa", "0-of-1", [Piece("w", 0, 1, torch.ones(1))])
    commit(tmp_path, Manifest("aa", 1, {}, (file,)).to_json())
    names = [f"{file.name}.begun", file.name, "manifest.json"]
    assert calls == [call for name in names for call in ("fsync", f"rename {name}", "fsync")]


def test_a_directory_that_is_made_is_on_the_disk_too(tmp_path, monkeypatch):
    brought: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        brought.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write_shard(tmp_path / "a" / "b", "aa", "0-of-1", [Piece("w", 0, 1, torch.ones(1))])
    assert brought[:2] == [str(tmp_path), str(tmp_path / "a")]


def test_what_an_earlier_save_left_and_cannot_be_removed_is_named_as_that(tmp_path, monkeypatch):
    for save in ("aa", "bb"):
        commit(tmp_path, Manifest(save, 1, {}, ()).to_json())

    def refuse(name: str, **_: object) -> None:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(FleetError, match=r"holds a complete checkpoint, but .*replaced\.json"):
        tidy(tmp_path)


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE])
def test_a_full_disk_is_told_from_others(tmp_path, monkeypatch, reason):
    def full(descriptor: int, data: object) -> int:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFullError, match=r"shard-0-of-1-aa\.safetensors could not be written"):
        write_shard(tmp_path, "aa", "0-of-1", [Piece("w", 0, 1, torch.ones(1))])
    assert [path.name for path in tmp_path.iterdir()] == ["shard-0-of-1-aa.safetensors.begun"]


def test_a_shard_is_a_safetensors_file_whatever_types_it_has(tmp_path):
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float16)
    pieces = [
        Piece(f"w{number}", 0, 6, torch.arange(6).reshape(3, 2).to(dtype), {"step": torch.tensor(3.0)})
        for number, dtype in enumerate(dtypes)
    ]
    pieces.append(Piece("t", 0, 6, torch.arange(6.0).reshape(2, 3).t()))
    file = write_shard(tmp_path, "aa", "0-of-1", pieces)
    found = load_file(tmp_path / file.name)
    for piece in pieces:
        assert torch.equal(found[f"{piece.param}[0:6]"], piece.value)
        assert found[f"{piece.param}[0:6]"].dtype == piece.value.dtype
    data = (tmp_path / file.name).read_bytes()
    assert (file.bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
