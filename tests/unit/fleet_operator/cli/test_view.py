"""What people read of a run, from the same news that the cluster gives."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fleet_operator.api import FleetJobStatus, JobState, ReplicaRestarts, Role, RoleStatus, parse_job
from fleet_operator.cli.lines import describe_exit, describe_progress, duration
from fleet_operator.cli.result import to_json, to_text
from fleet_operator.cli.run import RunResult
from fleet_operator.cli.table import render
from fleet_operator.cli.view import JobView
from fleet_operator.cluster.local_pod import LocalPod
from fleet_operator.plan.model import Attempt, PodPhase
from fleet_operator.plan.progress import Progress
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

    def __init__(self) -> None:
        self.said: list[str] = []
        self.view = JobView(JOB, self.said.append)

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
    restarts = RoleStatus(role=Role.TRAINER, restarts=(ReplicaRestarts(index=1, count=1),))
    watched.status(state=JobState.RESTARTING, failures=1, roles=(restarts,))
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


def test_the_table():
    watched = Watched()
    pod = a_pod()
    watched.live(a_pod(Role.PSERVER), 143)
    watched.live(pod)
    progress = Progress(step=4, total_steps=9, loss=0.51234, samples_per_second=1812.4)
    watched.view.progressed(watched.view.replicas[Role.TRAINER, 0], pod.uid, progress)
    watched.status(state=JobState.RUNNING)
    screen = io.StringIO()
    console = Console(file=screen, width=80)
    console.print(render(watched.view, NOW + timedelta(seconds=65)))
    text = screen.getvalue()
    rows = [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in text.splitlines()
    ]
    assert rows[0] == ["tiny: Running"]
    assert ["replica", "state", "step", "loss", "samples/s", "elapsed"] in rows
    assert ["pserver-0", "Failed (143)", "-", "-", "-", "7.0 s"] in rows
    assert ["trainer-0", "Running", "4/9", "0.5123", "1,812", "1 min 05 s"] in rows
    assert ["trainer-1", "Waiting", "-", "-", "-", "-"] in rows


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
        "wall_seconds": 12.346,
        "replicas": [
            {"role": "pserver", "index": 0, "exit_codes": [0], "restarts": 0},
            {"role": "trainer", "index": 0, "exit_codes": [137, 0], "restarts": 1},
            {"role": "trainer", "index": 1, "exit_codes": [0], "restarts": 0},
        ],
        "metrics": {"test_accuracy": 0.97},
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


def test_the_result_names_who_trained_past_the_others():
    watched = Watched()
    watched.live(a_pod(index=0), 0, message='{"step": 200, "counters": {}}')
    watched.live(a_pod(index=1), 0, message='{"step": 273, "counters": {"steps_past_the_others": 73}}')
    watched.status(state=JobState.SUCCEEDED)
    (line,) = [line for line in to_text(result(watched)).splitlines() if "past the others" in line]
    assert line.startswith("  trainer-1 joined late and trained 73 steps past the others")


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
        pytest.param(JobState.RUNNING, {"problem": "the guardian was killed"}, 1, id="a-run-that-broke"),
        pytest.param(JobState.SUCCEEDED, {"stopped_by": 130}, 0, id="one-interrupted-after-its-success"),
    ],
)
def test_the_exit_status_tells_the_truth(state, fields, status):
    watched = Watched()
    watched.status(state=state)
    assert result(watched, **fields).exit_status == status
