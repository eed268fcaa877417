"""Numbered checkpoints: which is the newest, and which may go."""

from pathlib import Path

import pytest

from fleet.checkpoint import find_checkpoint, keep_newest, numbers_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with whole checkpoints 1, 2, 9 and 10, and what saves that never ended have left."""
    for number in (1, 2, 9, 10):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / "manifest.json").write_text("")
    for number in (5, 11):
        (tmp_path / f"checkpoint-{number}").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_the_newest_whole_one_counts_by_number_not_by_name(folder):
    assert numbers_in(folder) == [1, 2, 5, 9, 10, 11]
    assert find_checkpoint(folder) == folder / "checkpoint-10"
    assert find_checkpoint(folder / "checkpoint-2") == folder / "checkpoint-2"


def test_where_there_is_none_none_is_found(folder, tmp_path):
    assert find_checkpoint(folder / "checkpoint-5") is None
    assert find_checkpoint(tmp_path / "nowhere") is None
    assert numbers_in(tmp_path / "nowhere") == []


@pytest.mark.parametrize(("count", "kept"), [(1, [10, 11]), (2, [9, 10, 11]), (9, [1, 2, 9, 10, 11])])
def test_the_newest_stay_and_so_does_what_may_become_one(folder, count, kept):
    keep_newest(folder, count)
    assert numbers_in(folder) == kept
    assert (folder / "notes").is_dir()
    assert (folder / "checkpoint-x").is_dir()
