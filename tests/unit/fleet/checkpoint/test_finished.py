"""The mark of a training that has ended: who believes it, and who does not."""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any

import pytest

from fleet.checkpoint import FINISHED_NAME, end_if_finished, leave_mark, read_mark
from fleet.process import lifecycle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def environ(folder: Path, **changes: str) -> dict[str, str]:
    return {"FLEET_CHECKPOINT_DIR": str(folder), "FLEET_JOB_UID": "uid-1", "FLEET_LIFE": "0"} | changes


def test_a_training_that_has_ended_is_known_by_its_mark(tmp_path: Path):
    assert read_mark(environ(tmp_path)) is None
    leave_mark(environ(tmp_path), {1, 0})
    assert read_mark(environ(tmp_path)) == (0, 1)
    assert [path.name for path in tmp_path.iterdir()] == [FINISHED_NAME]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"FLEET_JOB_UID": "uid-2"}, id="a-new-job-with-the-same-folder"),
        pytest.param({"FLEET_LIFE": "1"}, id="a-job-that-was-started-anew"),
        pytest.param({"FLEET_LIFE": ""}, id="an-operator-that-tells-of-no-lives"),
        pytest.param({"FLEET_JOB_UID": ""}, id="a-script-started-by-hand"),
    ],
)
def test_to_another_training_the_mark_says_nothing(tmp_path: Path, changes: dict[str, str]):
    leave_mark(environ(tmp_path), {0})
    assert read_mark(environ(tmp_path, **changes)) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "[" * 10_000, '{"job": "uid-1", "life": "0"}', '{"completedTrainers": [0]}']
    + [
        json.dumps({"job": "uid-1", "life": "0", "completedTrainers": each})
        for each in ("0", [], [True], [-1])
    ],
)
def test_what_is_no_mark_says_nothing(tmp_path: Path, text: str):
    (tmp_path / FINISHED_NAME).write_text(text)
    assert read_mark(environ(tmp_path)) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_in_the_marks_place_says_nothing_and_is_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
):
    make(tmp_path / FINISHED_NAME)
    assert read_mark(environ(tmp_path)) is None
    leave_mark(environ(tmp_path), {0})
    assert read_mark(environ(tmp_path)) == ((0,) if make is os.mkfifo else None)
    assert ("Is a directory" in caplog.text) is (make is os.mkdir)
    assert [path.name for path in tmp_path.iterdir()] == [FINISHED_NAME]


def test_a_folder_that_takes_no_mark_is_told_of_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        leave_mark(environ(tmp_path / "gone"), {0})
    assert "could not be recorded in" in caplog.text


def test_a_trainer_ends_well_by_a_mark_that_names_it_and_says_so_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lifecycle, "joined", lambda: None)
    said: list[Any] = []
    monkeypatch.setattr(lifecycle, "finish", said.append)
    leave_mark(environ(tmp_path), {0, 2})
    end_if_finished(environ(tmp_path), 1)  # it was given up: others completed without it
    assert not caplog.records
    with pytest.raises(SystemExit) as ended:
        end_if_finished(environ(tmp_path), 2)
    assert ended.value.code == 0
    assert said == [(0, 2)]
    [line] = caplog.messages
    assert "this training run has already finished, according to finished.json in" in line
