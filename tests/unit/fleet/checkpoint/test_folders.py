"""Numbered checkpoints: which is the newest, and which may go."""

from pathlib import Path

import pytest

from fleet.checkpoint import Manifest, find_checkpoint, keep_newest, numbers_in
from fleet.errors import CheckpointError, FleetError


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
    assert numbers_in(folder) == [1, 2, 5, 9, 10, 11]
    assert found_in(folder) == folder / "checkpoint-10"
    assert found_in(folder / "checkpoint-2") == folder / "checkpoint-2"


@pytest.mark.parametrize(("step", "newest"), [(9, "checkpoint-10"), (11, ".")])
def test_one_in_the_folder_itself_counts_by_its_step(folder, step, newest):
    make(folder, step)
    assert found_in(folder) == folder / newest


def test_a_damaged_one_is_passed_over_with_a_warning_unless_it_is_the_only_one(folder, caplog):
    broken = folder / "checkpoint-10"
    (broken / "manifest.json").write_text("{")
    assert found_in(folder) == folder / "checkpoint-9"
    assert f"passed over a checkpoint: {broken}/manifest.json is truncated" in caplog.text
    with pytest.raises(CheckpointError, match="is truncated or no manifest"):
        find_checkpoint(broken)


def test_what_cannot_be_removed_is_named(folder, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(FleetError, match=r"checkpoint-1 could not be removed: .*Permission denied"):
        keep_newest(folder, 1)


def test_where_there_is_none_none_is_found(folder, tmp_path):
    assert found_in(folder / "checkpoint-5") is None
    assert found_in(tmp_path / "nowhere") is None
    assert numbers_in(tmp_path / "nowhere") == []


@pytest.mark.parametrize(("count", "kept"), [(1, [10, 11]), (2, [9, 10, 11]), (9, [1, 2, 9, 10, 11])])
def test_the_newest_stay_and_so_does_what_may_become_one(folder, count, kept):
    keep_newest(folder, count)
    assert numbers_in(folder) == kept
    assert (folder / "notes").is_dir()
    assert (folder / "checkpoint-x").is_dir()


def test_a_number_that_no_save_gives_is_passed_over_by_name_and_is_never_counted_on(folder, caplog):
    beyond = folder / "checkpoint-9999999999999999999999999"
    make(beyond, 12)
    make(folder / "checkpoint-0099", 13)
    make(folder / "checkpoint-\u0661\u0662", 14)  # digits of another script
    assert numbers_in(folder) == [1, 2, 5, 9, 10, 11]
    assert found_in(folder) == folder / "checkpoint-10"
    assert f"passed over a checkpoint: {beyond} has a number that no save gives" in caplog.text
    assert found_in(beyond) == beyond


def test_where_all_numbers_are_beyond_what_saves_give_the_error_names_one(tmp_path):
    make(tmp_path / "checkpoint-9999999999999999999999999", 12)
    with pytest.raises(CheckpointError, match=r"checkpoint-9{25} has a number that no save gives"):
        find_checkpoint(tmp_path)


def test_a_manifest_of_any_depth_is_passed_over_for_the_one_before(folder, caplog):
    broken = folder / "checkpoint-10" / "manifest.json"
    broken.write_text('{"facts": ' + "[" * 200_000 + "]" * 200_000 + "}")
    assert found_in(folder) == folder / "checkpoint-9"
    assert f"passed over a checkpoint: {broken} is truncated or no manifest" in caplog.text
