"""Which files are whose."""

from pathlib import Path
from typing import Any

import pytest

from fleet.errors import ConfigurationError
from fleet.role_maker import share_of_files


def test_each_trainer_gets_a_block_and_the_lowest_ones_what_remains():
    files = [f"part-{number}" for number in range(8)]
    assert [share_of_files(files, index, 3) for index in range(3)] == [files[:3], files[3:6], files[6:]]
    assert share_of_files(files[:1], 1, 2) == []


def test_paths_stay_paths():
    files = [Path("a"), Path("b")]
    assert share_of_files(files, 1, 2) == [Path("b")]


@pytest.mark.parametrize("files", ["part-0", Path("part-0"), [1], iter(["part-0"]), None])
def test_what_is_no_list_of_files_is_refused(files: Any):
    with pytest.raises(
        ConfigurationError, match=r"split_files: files is .*expected a list of file names or paths"
    ):
        share_of_files(files, 0, 1)
