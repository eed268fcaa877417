from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.api import parse_job
from fleet_operator.cli.run_record import POINTS, RECORD, RunRecord, is_live, register, run_id
from fleet_operator.cli.ui.machine import LOG_BYTES, LocalRuns, Points
from fleet_operator.cli.view import JobView
from fleet_operator.plan.observe.progress import Progress
from tests.support.jobs import collective_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def view(said: list[str]) -> JobView:
    return JobView(parse_job(collective_manifest()), said.append)


def hear(view: JobView, **progress: Any) -> None:
    next(iter(view.replicas.values())).hear(Progress(**progress))


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs" / "digits-1"
    folder.mkdir(parents=True)
    return folder


def test_a_run_is_shown_while_its_runner_lives_and_as_lost_afterwards(
    logs: Path, view: JobView, said: list[str]
):
    runs = LocalRuns([logs.parent])
    record = RunRecord(logs, view.job, said.append)
    record.note("trainer-0 has started")
    hear(view, step=2, total_steps=4, loss=0.5, history={1: 1.0, 2: 0.5}, metrics={"accuracy": 0.75})
    record.update(view)
    [row] = runs.rows()
    assert (row["state"], row["step"], row["percentage"], row["loss"]) == ("Pending", 2, 50, 0.5)
    detail = runs.detail(row["id"])
    assert detail is not None
    assert detail["series"]["loss"] == {"trainer-0": [(1, 1.0), (2, 0.5)]}
    assert detail["series"]["accuracy"] == {"trainer-0": [(2, 0.75)]}
    assert [event["message"] for event in detail["events"]] == ["trainer-0 has started"]
    hear(view, step=3, loss=0.25, history={1: 1.0, 2: 0.5, 3: 0.25})
    record.update(view)
    detail = runs.detail(row["id"])
    assert detail is not None
    assert detail["series"]["loss"] == {"trainer-0": [(1, 1.0), (2, 0.5), (3, 0.25)]}
    record.close()
    [row] = runs.rows()
    assert row["state"] == "Lost"
    assert said == []


def test_a_trainer_that_starts_over_draws_its_curve_again(logs: Path, view: JobView, said: list[str]):
    runs, record = LocalRuns([logs]), RunRecord(logs, view.job, said.append)
    hear(view, step=3, history={1: 1.0, 2: 0.9, 3: 0.8})
    record.update(view)
    next(iter(view.replicas.values())).progress = None
    hear(view, step=1, history={1: 1.5})
    record.update(view)
    detail = runs.detail(run_id(logs))
    assert detail is not None
    assert detail["series"]["loss"] == {"trainer-0": [(1, 1.5)]}
    record.close()


def test_two_requests_read_the_points_one_after_the_other(
    logs: Path, view: JobView, said: list[str], monkeypatch: pytest.MonkeyPatch
):
    with closing(RunRecord(logs, view.job, said.append)) as record:
        record.update(view)
    runs, meeting, met = LocalRuns([logs]), threading.Barrier(2), list[int]()

    def read(_: Points) -> None:
        with suppress(threading.BrokenBarrierError):
            met.append(meeting.wait(0.2))

    monkeypatch.setattr(Points, "read", read)
    with ThreadPoolExecutor(2) as pool:
        assert None not in [*pool.map(runs.detail, [run_id(logs)] * 2)]
    assert met == []


def test_a_record_that_cannot_be_written_does_not_end_the_run(logs: Path, view: JobView, said: list[str]):
    (logs / POINTS).mkdir()
    record = RunRecord(logs, view.job, said.append)
    record.update(view)
    record.close()
    [line] = said
    assert line == f"`fleetjob ui` cannot show this run: {logs / POINTS}: Is a directory"


def test_a_second_run_in_a_log_folder_is_not_recorded_and_changes_nothing(
    logs: Path, view: JobView, said: list[str]
):
    with closing(RunRecord(logs, view.job, said.append)) as first:
        hear(view, step=1, history={1: 1.5})
        first.update(view)
        before = (logs / RECORD).read_bytes(), (logs / POINTS).read_bytes()
        with closing(RunRecord(logs, view.job, said.append)) as second:
            second.update(view)
        assert ((logs / RECORD).read_bytes(), (logs / POINTS).read_bytes()) == before
        assert is_live(logs)
    why = "another run uses this log folder; give each run its own --log-dir"
    assert said == [f"`fleetjob ui` cannot show this run: {logs / POINTS}: {why}"]


def test_the_user_s_runs_are_links_and_links_to_nothing_go(tmp_path: Path):
    runs, folders = tmp_path / "state" / "runs", [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        register(folder, runs)
        register(folder, runs)
    assert {link.resolve() for link in runs.iterdir()} == set(folders)
    folders[0].rmdir()
    register(folders[1], runs)
    assert [link.resolve() for link in runs.iterdir()] == [folders[1]]


def test_a_link_that_another_run_removes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runs, folder = tmp_path / "runs", tmp_path / "a"
    folder.mkdir()
    runs.mkdir()
    dead = runs / "dead"
    dead.symlink_to(tmp_path / "nothing")
    listed = type(runs).iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        found = [*listed(path)]
        dead.unlink()
        return iter(found)

    monkeypatch.setattr(type(runs), "iterdir", iterdir)
    register(folder, runs)
    monkeypatch.undo()
    assert [link.resolve() for link in runs.iterdir()] == [folder]


def test_a_later_run_in_the_same_log_folder_has_curves_of_its_own(
    logs: Path, view: JobView, said: list[str], monkeypatch: pytest.MonkeyPatch
):
    runs = LocalRuns([logs])
    for day, history in ((1, {1: 1.0}), (2, {1: 9.0, 2: 8.0, 3: 7.0})):
        began = datetime(2026, 1, day, tzinfo=UTC)
        monkeypatch.setattr("fleet_operator.cli.run_record.now", began.replace)
        next(iter(view.replicas.values())).progress = None
        hear(view, step=len(history), history=history)
        with closing(RunRecord(logs, view.job, said.append)) as record:
            record.update(view)
        detail = runs.detail(run_id(logs))
        assert detail is not None
        assert detail["series"]["loss"] == {"trainer-0": [*history.items()]}


def test_a_record_that_was_replaced_within_the_same_tick_is_read_again(
    logs: Path, view: JobView, said: list[str]
):
    runs = LocalRuns([logs])
    with closing(RunRecord(logs, view.job, said.append)) as record:
        for state in ("Running", "Stopped"):
            record.finish(view, state, "")
            os.utime(logs / RECORD, ns=(0, 0))
            assert [row["state"] for row in runs.rows()] == [state]


def test_what_is_no_record_is_left_out(logs: Path):
    for text in ("", "[]", '{"version": 2}', "{"):
        (logs / RECORD).write_text(text)
        assert LocalRuns([logs.parent]).rows() == []
    assert not is_live(logs)


def record_only(folder: Path) -> str:
    document = {"version": 1, "name": "digits", "mode": "Collective", "state": "Succeeded", "message": ""}
    document |= {"started": None, "ended": None, "replicas": [], "events": []}
    (folder / RECORD).write_text(json.dumps(document))
    return run_id(folder)


def test_a_log_is_followed_by_whole_lines_without_control_characters(logs: Path):
    name, log = record_only(logs), logs / "trainer-0.log"
    runs = LocalRuns([logs.parent])
    assert runs.log(name, "trainer-0", "") == {"lines": [], "next": ""}
    log.write_bytes(b"one\n\x1b[31mtwo\x1b[0m\nthr")
    first = runs.log(name, "trainer-0", "")
    assert first == {"lines": ["one", "two"], "next": "17"}
    with log.open("ab") as file:
        file.write(b"ee\n")
    assert runs.log(name, "trainer-0", "17") == {"lines": ["three"], "next": "23"}
    assert runs.log(name, "trainer-0", "23") == {"lines": [], "next": "23"}


def test_the_first_answer_is_the_end_of_a_long_log(logs: Path):
    name = record_only(logs)
    (logs / "trainer-0.log").write_text("".join(f"{number:07}\n" for number in range(LOG_BYTES // 4)))
    answer = LocalRuns([logs]).log(name, "trainer-0", "")
    assert answer is not None
    assert answer["lines"][-1] == f"{LOG_BYTES // 4 - 1:07}"
    assert all(len(line) == 7 for line in answer["lines"])


@pytest.mark.parametrize("replica", ["../secret", "/etc/passwd", "trainer-0/../../secret", "", "trainer-x"])
def test_only_logs_of_replicas_are_read(logs: Path, replica: str):
    name = record_only(logs)
    (logs.parent / "secret.log").write_text("secret\n")
    assert LocalRuns([logs.parent]).log(name, replica, "") is None
    assert LocalRuns([logs.parent]).log("../logs", "trainer-0", "") is None
