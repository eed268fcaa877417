"""What people read of a run, from the same news that the cluster gives."""

from __future__ import annotations

import errno
import io
import json
import os
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fleet_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    FleetJobStatus,
    JobState,
    ReplicaRestarts,
    Role,
    StoredLedger,
    StoredRole,
    TableStatistics,
    parse_job,
)
from fleet_operator.cli.display import LineDisplay, TableDisplay
from fleet_operator.cli.lines import clock, describe_exit, describe_progress, duration, names
from fleet_operator.cli.replica import ReplicaView
from fleet_operator.cli.result import to_json, to_text
from fleet_operator.cli.run import RunResult
from fleet_operator.cli.table import STYLES, render
from fleet_operator.cli.view import JobView
from fleet_operator.local.pod import LocalPod
from fleet_operator.plan.model import Attempt, PodPhase
from fleet_operator.plan.observe.progress import Progress
from tests.support.documents import block
from tests.support.local import job_manifest

FIRST = Attempt()
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
JOB = parse_job(job_manifest("pass", trainers=2))


def a_pod(role: Role = Role.TRAINER, index: int = 0, *, attempt: Attempt = FIRST, **fields: Any) -> LocalPod:
    name = f"tiny-{role.value}-{index}"
    return replace(
        LocalPod(
            manifest={"metadata": {"name": name}, "spec": {"containers": [{"name": "fleet"}]}},
            uid=f"{name}.{attempt}",
            role=role,
            index=index,
            attempt=attempt,
            host="127.1.1.2",
            log=Path("log"),
            termination_log=Path("termination"),
            created_at=NOW,
        ),
        **fields,
    )


def running(pod: LocalPod) -> LocalPod:
    return replace(pod, phase=PodPhase.RUNNING, pid=11, started_at=NOW, ready=True)


def ended(pod: LocalPod, code: int, **fields: Any) -> LocalPod:
    phase = PodPhase.FAILED if code else PodPhase.SUCCEEDED
    return replace(
        running(pod), phase=phase, exit_code=code, finished_at=NOW + timedelta(seconds=7), **fields
    )


class Watched:
    """A view with what it said."""

    def __init__(self, **job: Any) -> None:
        self.said: list[str] = []
        self.view = JobView(parse_job(job_manifest("pass", **job)) if job else JOB, self.said.append)

    def hears(self, pod: LocalPod, progress: Progress, seconds: float = 0) -> None:
        replica = self.view.replicas[pod.role, pod.index]
        self.view.progressed(replica, pod.uid, progress, NOW + timedelta(seconds=seconds))

    def waiting(self, seconds: float) -> list[str]:
        return self.view.waiting(NOW + timedelta(seconds=seconds))

    def live(self, pod: LocalPod, code: int | None = None, **fields: Any) -> None:
        for state in (pod, running(pod), *([] if code is None else [ended(pod, code, **fields)])):
            self.view.pod_changed(state)

    def status(self, **fields: Any) -> None:
        before = self.view.job
        self.view.status_written(before, before.with_status(FleetJobStatus(**fields)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"exit_code": 137}, "trainer-0 was ended by SIGKILL (exit code 137)"),
        ({"exit_code": 139}, "trainer-0 was ended by SIGSEGV (exit code 139)"),
        ({"exit_code": 3}, "trainer-0 failed with exit code 3"),
        (
            {"exit_code": 1, "message": "Traceback\nValueError: no\n"},
            "trainer-0 failed with exit code 1: ValueError: no",
        ),
        ({"exit_code": 250}, "trainer-0 failed with exit code 250"),
        (
            {"exit_code": 128, "reason": "StartError", "message": "no x"},
            "trainer-0 could not run (StartError): no x",
        ),
    ],
)
def test_how_a_failure_is_told(fields, said):
    assert describe_exit(a_pod(**fields), JOB) == said


def test_a_failure_is_told_with_what_the_plan_does_about_it():
    watched = Watched()
    watched.live(a_pod(index=1), 137)
    assert not any("killed" in line for line in watched.said)
    restarts = StoredRole(restarts=(ReplicaRestarts(index=1, count=1),))
    watched.status(state=JobState.RESTARTING, failures=1, ledger=StoredLedger(roles={"trainer": restarts}))
    assert watched.said[-2:] == [
        "trainer-1 was ended by SIGKILL (exit code 137); restarting (1 of 6)",
        "the job is Restarting",
    ]
    replica = watched.view.replicas[Role.TRAINER, 1]
    assert (replica.state, replica.restarts) == ("Restarting", 0)
    watched.live(a_pod(index=1, attempt=Attempt(0, 1)), 0)
    assert (replica.state, replica.restarts, replica.exit_codes) == ("Succeeded", 1, [137, 0])


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            {"state": JobState.RESTARTING, "failures": 2, "job_restarts": 1},
            "; restarting the whole job (2 of 6)",
        ),
        ({"state": JobState.RESTARTING, "job_restarts": 1}, "; restarting the whole job"),
        ({"state": JobState.FAILED}, "; the job fails"),
        ({"state": JobState.SUCCEEDED}, "; the job has succeeded without it"),
    ],
)
def test_what_follows_a_failure(status, said):
    watched = Watched()
    watched.live(a_pod(), 1)
    watched.status(**status)
    assert f"trainer-0 failed with exit code 1{said}" in watched.said


def test_a_failure_that_the_plan_ignores_is_told_alone():
    watched = Watched()
    watched.live(a_pod(), 1)
    watched.view.tell_failures(older_than=NOW)
    assert watched.said[-1].endswith("has started: process 11, address 127.1.1.2")
    watched.view.tell_failures()
    assert watched.said[-1] == "trainer-0 failed with exit code 1"


def test_a_pod_that_was_deleted_has_not_failed():
    watched = Watched()
    watched.live(a_pod(Role.PSERVER), 143, deleted_at=NOW)
    assert watched.said[-1] == "pserver-0 was stopped (exit code 143)"


def test_the_last_words_carry_the_metrics_and_the_lowest_trainer_counts():
    watched = Watched()
    for index, accuracy in ((0, 0.9), (1, 0.8)):
        words = f'{{"step": 3, "metrics": {{"test_accuracy": {accuracy}, "own_{index}": 1}}}}'
        watched.live(a_pod(index=index), 0, message=words)
    assert watched.view.metrics == {"test_accuracy": 0.9, "own_0": 1.0, "own_1": 1.0}


def test_progress_of_an_ended_life_is_not_taken():
    watched = Watched()
    pod = a_pod()
    watched.live(pod, 1)
    replica = watched.view.replicas[Role.TRAINER, 0]
    watched.view.progressed(replica, pod.uid, Progress(step=3))
    assert replica.progress is None


def test_the_curve_starts_anew_with_the_whole_job_and_not_with_a_replica():
    watched = Watched()
    replica = watched.view.replicas[Role.TRAINER, 0]
    pod = a_pod()
    watched.live(pod)
    watched.view.progressed(replica, pod.uid, Progress(step=3, history={3: 1.0}))
    watched.live(pod, 1)
    watched.live(a_pod(attempt=Attempt(0, 1)), 1)
    assert replica.progress is not None
    watched.live(a_pod(attempt=Attempt(1, 1)))
    assert replica.progress is None


def test_one_line_about_the_progress():
    watched = Watched()
    pods = [a_pod(index=index) for index in (0, 1)]
    assert describe_progress(watched.view.replicas.values()) == ""
    for pod, progress in zip(
        pods,
        (Progress(step=4, total_steps=9, loss=0.5, samples_per_second=81.6), Progress(step=3)),
        strict=True,
    ):
        watched.live(pod)
        watched.view.progressed(watched.view.replicas[Role.TRAINER, pod.index], pod.uid, progress)
    expected = "trainer-0 step 4/9, loss 0.5, 82 samples/s; trainer-1 step 3"
    assert describe_progress(watched.view.replicas.values()) == expected


def cells(
    watched: Watched, *, width: int = 80, height: int = 40, seconds: float = 65
) -> dict[str, list[str]]:
    """Return what the table shows of each replica, by its name."""
    return {row[0]: row[1:] for row in map(str.split, screen(watched, width, height, seconds)) if row}


def screen(watched: Watched, width: int = 80, height: int = 40, seconds: float = 65) -> list[str]:
    """Return the lines that a terminal shows."""
    file = io.StringIO()
    console = Console(file=file, width=width)
    console.print(render(watched.view, NOW + timedelta(seconds=seconds), width=width, height=height))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_the_table():
    watched = Watched()
    server, trainer = a_pod(Role.PSERVER), a_pod()
    watched.live(server, 143)
    watched.live(trainer)
    watched.hears(trainer, Progress(step=4, total_steps=9, loss=0.51234, samples_per_second=1812.4))
    watched.status(state=JobState.RUNNING)
    assert screen(watched)[0] == "tiny: Running"
    shown = cells(watched)
    assert shown["pserver"] == ["state", "memory", "elapsed"]
    assert shown["pserver-0"] == ["Failed", "(143)", "-", "0:07"]
    assert shown["trainer"] == ["state", "step", "loss", "samples/s", "elapsed"]
    assert shown["trainer-0"] == ["Running", "4/9", "0.5123", "1,812", "1:05"]
    assert shown["trainer-1"] == ["Waiting", "-", "-", "-", "-"]


def test_servers_show_their_memory_and_what_they_hold():
    watched = Watched()
    pod = a_pod(Role.PSERVER)
    watched.live(pod)
    watched.hears(pod, Progress(memory_bytes=3_412_000_000, parameter_bytes=812_000))
    assert cells(watched)["pserver"] == ["state", "memory", "bytes", "elapsed"]
    assert cells(watched)["pserver-0"] == ["Running", "3.4", "GB", "812.0", "kB", "1:05"]
    tables = (TableStatistics(name="u", rows=12_345, bytes=10**9), TableStatistics(name="v", rows=1, bytes=0))
    watched.hears(pod, Progress(memory_bytes=3_412_000_000, parameter_bytes=812_000, tables=tables))
    assert cells(watched)["pserver"] == ["state", "memory", "rows", "bytes", "elapsed"]
    assert cells(watched)["pserver-0"] == ["Running", "3.4", "GB", "12,346", "1.0", "GB", "1:05"]


def test_a_terminal_that_says_it_has_no_columns_ends_no_run():
    watched = Watched(trainers=2)
    watched.live(a_pod())
    assert watched.waiting(30)  # what is waited for has lines, whose number goes by the width
    render(watched.view, NOW + timedelta(seconds=30), width=0, height=0)  # COLUMNS=0


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (40, ["state", "step"]),
        (48, ["state", "step", "loss"]),
        (60, ["state", "step", "loss", "samples/s"]),
        (80, ["state", "step", "loss", "samples/s", "elapsed"]),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns_and_whole_numbers(width, columns):
    watched = Watched(trainers=13)
    for index in (0, 12):
        pod = a_pod(index=index)
        watched.live(pod)
        watched.hears(pod, Progress(step=1, total_steps=1000000, loss=10.5, samples_per_second=1812.4))
        watched.hears(pod, Progress(step=99950, total_steps=1000000, loss=10.5), seconds=60)
    watched.status(state=JobState.RUNNING)
    lines = screen(watched, width)
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line]
    assert cells(watched, width=width)["trainer"] == columns
    row = ["Running", "99950/1000000", "10.5000", "1,812", "1:05"]
    assert cells(watched, width=width)["trainer-12"] == row[: len(columns)]
    assert lines[1].endswith("9%  ETA 9:01")


def test_more_replicas_than_rows_are_folded_and_those_in_trouble_shown():
    watched = Watched(trainers=100, servers=50)
    for index in range(50):
        watched.live(a_pod(Role.PSERVER, index))
    for index in range(100):
        pod = a_pod(index=index)
        watched.live(pod, 137 if index == 98 else None)
        if index not in (70, 98):
            watched.hears(pod, Progress(step=3))
    lines = screen(watched, 80, 24)
    assert len(lines) <= 23
    shown = cells(watched, height=24)
    assert shown["trainer-98"][:2] == ["Failed", "(137)"]
    assert shown["trainer-70"][0] == "Starting"
    shown_trainers = [name for name in shown if re.fullmatch(r"trainer-\d+", name)]
    assert shown_trainers[-2:] == ["trainer-70", "trainer-98"]
    healthy = shown_trainers[:-2]
    assert healthy == [f"trainer-{index}" for index in range(len(healthy))]
    assert f"and {98 - len(healthy)} more: {98 - len(healthy)} Running" in lines
    assert next(line for line in lines if line.endswith(" Running") and line.startswith("and ")) != lines[-1]
    assert lines[-1] == "trainer-70: importing torch, or what else its script does before fleet.init()"
    assert len(screen(watched, 80, 200)) == 154


def test_a_table_that_needs_less_than_its_share_leaves_the_rest_to_the_other():
    watched = Watched(trainers=100, servers=2)
    shown = cells(watched, height=24)
    assert {"pserver-0", "pserver-1", "trainer-15"} <= shown.keys()


def test_a_bar_says_how_far_the_job_is_and_how_long_the_rest_takes():
    watched = Watched()
    pod = a_pod()
    watched.live(pod)
    for step in (0, 10, 20, 30):
        watched.hears(pod, Progress(step=step, total_steps=100), seconds=step / 2)
    assert screen(watched)[1].endswith("30%  ETA 0:35")
    watched.hears(pod, Progress(step=100, total_steps=100), seconds=60)
    assert screen(watched)[1].endswith("100%")
    watched.live(a_pod(attempt=Attempt(0, 1)))  # which has no pace yet
    watched.hears(a_pod(attempt=Attempt(0, 1)), Progress(step=40, total_steps=100), seconds=61)
    assert screen(watched)[1].endswith("40%")


def test_what_starts_says_after_five_seconds_what_it_waits_for():
    watched = Watched(trainers=4)
    server, *trainers = a_pod(Role.PSERVER), *(a_pod(index=index) for index in range(4))
    watched.view.pod_changed(server)
    watched.view.pod_changed(replace(running(server), ready=False))
    for pod in trainers:
        watched.live(pod)
    assert {cells(watched)[name][0] for name in ("pserver-0", "trainer-0")} == {"Starting"}
    assert watched.waiting(4) == []
    imports = "importing torch, or what else its script does before fleet.init()"
    assert watched.waiting(5) == [f"pserver-0: {imports}", f"trainers 0-3: {imports}"]
    watched.hears(server, Progress(waits_for="its checkpoint to be read"))
    for pod in trainers[1:]:
        watched.hears(pod, Progress(waits_for="parameter server 127.1.1.2:6174 to listen"))
    assert watched.waiting(5) == [
        "pserver-0: waiting for its checkpoint to be read",
        f"trainer-0: {imports}",
        "trainers 1-3: waiting for parameter server 127.1.1.2:6174 to listen",
    ]
    watched.view.pod_changed(running(server))
    for pod in trainers:
        watched.hears(pod, Progress())
    assert watched.waiting(500) == []
    assert {cells(watched)[name][0] for name in ("pserver-0", "trainer-0")} == {"Running"}


def test_a_script_that_need_not_use_fleet_is_not_said_to_start_for_ever():
    watched = Watched(server=None)
    watched.live(a_pod())
    assert cells(watched)["trainer-0"][0] == "Running"
    assert (len(watched.waiting(6)), len(watched.waiting(61))) == (1, 0)


def test_a_path_above_the_table_is_not_cut():
    watched, file = Watched(), io.StringIO()
    display = TableDisplay(Console(file=file, width=48, force_terminal=True), lambda: NOW)
    with display.showing(watched.view):
        display.say(f"summary: /home/me/{'long' * 20}/summary.html")
    assert f"/home/me/{'long' * 20}/summary.html" in file.getvalue()


class Terminal(io.StringIO):
    """A terminal that may be closed."""

    is_closed = False

    def write(self, text: str) -> int:
        if self.is_closed:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(text)


@pytest.mark.parametrize("is_closed", [True, False], ids=["before the table", "while it is shown"])
def test_a_closed_terminal_does_not_end_the_training(is_closed):
    watched, terminal = Watched(), Terminal()
    display = TableDisplay(Console(file=terminal, width=48, force_terminal=True), lambda: NOW)
    terminal.is_closed = is_closed
    with display.showing(watched.view):
        terminal.is_closed = True
        display.say("SIGHUP: stopping all replicas")
        display.refresh()
    display.say("summary")


def test_lines_tell_what_is_waited_for_once():
    watched = Watched()
    file, moment = io.StringIO(), [NOW]
    display = LineDisplay(Console(file=file, width=80), lambda: moment[0])
    watched.live(a_pod())
    with display.showing(watched.view):
        display.refresh()
        assert file.getvalue() == ""
        moment[0] = NOW + timedelta(seconds=5)
        display.refresh()
        display.refresh()
    assert file.getvalue().count("trainer-0: importing torch") == 1


@pytest.mark.parametrize(
    ("indices", "named"),
    [([1], "trainer-1"), ([0, 1, 2], "trainers 0-2"), ([0, 2, 3, 7], "trainers 0, 2-3 and 7")],
)
def test_names(indices, named):
    assert names([ReplicaView(Role.TRAINER, index) for index in indices]) == named


@pytest.mark.parametrize(("seconds", "text"), [(7.2, "0:07"), (65, "1:05"), (3725, "1:02:05")])
def test_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.26, "7.3 s"), (60, "1 min 00 s"), (125.4, "2 min 05 s"), (3720, "1 h 02 min")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def result(watched: Watched, **fields: Any) -> RunResult:
    return RunResult(watched.view, Path("logs"), 12.3456, **fields)


def test_the_result_of_a_success():
    watched = Watched()
    watched.live(a_pod(Role.PSERVER), 0)
    watched.live(a_pod(index=0), 137)
    watched.live(
        a_pod(index=0, attempt=Attempt(0, 1)), 0, message='{"step": 1, "metrics": {"test_accuracy": 0.97}}'
    )
    watched.live(a_pod(index=1), 0)
    watched.status(state=JobState.SUCCEEDED)
    assert result(watched).exit_status == 0
    assert to_json(result(watched)) == {
        "state": "Succeeded",
        "reason": None,
        "message": None,
        "wall_seconds": 12.346,
        "replicas": [
            {"role": role, "index": index, "state": "Succeeded", "exit_codes": codes, "restarts": restarts}
            | {"log": f"logs/{role}-{index}.log"}
            for role, index, codes, restarts in (
                ("pserver", 0, [0], 0),
                ("trainer", 0, [137, 0], 1),
                ("trainer", 1, [0], 0),
            )
        ],
        "metrics": {"test_accuracy": 0.97},
        "logs": "logs",
    }
    assert to_text(result(watched)).splitlines() == [
        "tiny: Succeeded, 12.3 s",
        "  pserver-0  exit code 0",
        "  trainer-0  exit codes 137, 0; restarted once",
        "  trainer-1  exit code 0",
        "  test_accuracy 0.97",
        "  logs in logs",
    ]


def test_the_page_shows_the_object_of_a_run():
    shown = json.loads(block("docs/local.md", "What you see", "json"))
    watched = Watched()
    watched.live(a_pod(Role.PSERVER), 0)
    watched.status(state=JobState.SUCCEEDED)
    made = to_json(result(watched))
    assert shown.keys() == made.keys()
    assert [each.keys() for each in shown["replicas"]] == [made["replicas"][0].keys()]


FAILED = Condition(
    type=ConditionType.FAILED,
    status=ConditionStatus.TRUE,
    reason="BackoffLimitExceeded",
    message="trainer-0 failed with exit code 1: no data",
    last_transition_time=NOW,
)


def test_the_result_of_a_failure_says_why_and_where_the_logs_are():
    watched = Watched()
    watched.live(a_pod(Role.PSERVER), 143, deleted_at=NOW)
    watched.live(a_pod(index=0), 1)
    watched.status(state=JobState.FAILED, conditions=(FAILED,))
    told = to_json(result(watched))
    assert (told["state"], told["reason"], told["message"]) == ("Failed", FAILED.reason, FAILED.message)
    assert [(each["state"], each["log"]) for each in told["replicas"]] == [
        ("Stopped", "logs/pserver-0.log"),
        ("Failed", "logs/trainer-0.log"),
        ("Waiting", None),
    ]
    assert to_text(result(watched)).splitlines() == [
        "tiny: Failed, 12.3 s",
        "  trainer-0 failed with exit code 1: no data",
        "  pserver-0  stopped, exit code 143",
        "  trainer-0  exit code 1",
        "  trainer-1  was not started",
        "  logs in logs",
    ]


@pytest.mark.parametrize(
    ("stopped_by", "reason", "message"),
    [
        (130, "SIGINT", "the run was stopped by SIGINT, before the job had finished"),
        (143, "SIGTERM", "the run was stopped by SIGTERM, before the job had finished"),
        (124, "Timeout", "the run was stopped after --timeout, before the job had finished"),
    ],
)
def test_a_run_that_was_stopped_has_not_failed_and_neither_have_its_replicas(stopped_by, reason, message):
    watched = Watched()
    watched.live(a_pod(index=0))
    watched.live(a_pod(index=1), 1)
    watched.status(state=JobState.RUNNING)
    watched.view.interrupted = True
    assert watched.view.state == "Stopping"
    watched.live(a_pod(index=0), 143)
    assert watched.view.state == "Stopped"
    stopped = result(watched, stopped_by=stopped_by)
    told = to_json(stopped)
    assert (told["state"], told["reason"], told["message"]) == ("Stopped", reason, message)
    assert [each["state"] for each in told["replicas"]] == ["Waiting", "Stopped", "Failed"]
    assert to_text(stopped).startswith(f"tiny: Stopped, 12.3 s\n  {message}\n")
    assert f"{cells(watched)['trainer-0'][0]} {STYLES['Stopped']}" == "Stopped cyan"


def test_a_run_that_broke_has_failed():
    watched = Watched()
    watched.live(a_pod(index=0), 137)
    watched.status(state=JobState.RUNNING)
    told = to_json(result(watched, problem="the supervisor was killed"))
    assert (told["state"], told["reason"]) == ("Failed", "RunFailed")
    assert told["message"] == "the supervisor was killed"


def test_the_result_names_who_trained_past_the_others():
    watched = Watched()
    watched.live(a_pod(index=0), 0, message='{"step": 200, "counters": {}}')
    watched.live(a_pod(index=1), 0, message='{"step": 273, "counters": {"steps_past_the_others": 73}}')
    watched.status(state=JobState.SUCCEEDED)
    (line,) = [line for line in to_text(result(watched)).splitlines() if "after the others completed" in line]
    assert line.startswith("  trainer-1 joined late, and made 73 steps after the others completed")


def test_the_result_names_whose_weights_are_lost():
    watched = Watched()
    watched.live(a_pod(index=0), 0, message='{"step": 9, "counters": {"non_finite_parameters": 2}}')
    watched.status(state=JobState.SUCCEEDED)
    assert "  trainer-0 ended with NaN or infinity in 2 parameters" in to_text(result(watched))


@pytest.mark.parametrize(
    ("state", "fields", "status"),
    [
        pytest.param(JobState.FAILED, {}, 1, id="a-failed-job"),
        pytest.param(JobState.RUNNING, {"stopped_by": 130}, 130, id="an-interrupted-one"),
        pytest.param(JobState.RUNNING, {"problem": "the supervisor was killed"}, 1, id="a-run-that-broke"),
        pytest.param(JobState.SUCCEEDED, {"stopped_by": 130}, 0, id="one-interrupted-after-its-success"),
    ],
)
def test_the_exit_status_tells_the_truth(state, fields, status):
    watched = Watched()
    watched.status(state=state)
    assert result(watched, **fields).exit_status == status
