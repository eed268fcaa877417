"""Jobs of an API server in a few words."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from fleet_operator.cli.status import table_of
from fleet_operator.client.summary import UNSEEN, Summary, age, details

NOW = datetime(2026, 1, 1, 0, 5, tzinfo=UTC)


def condition(kind: str, reason: str, message: str, status: str = "True") -> dict[str, str]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def summary(status: dict[str, Any] | None = None, **metadata: Any) -> Summary:
    named = {"name": "digits", "namespace": "team", "creationTimestamp": "2026-01-01T00:00:00Z"}
    spec = {"mode": "ParameterServer", "runPolicy": {"backoffLimit": 6}}
    return Summary.of({"metadata": named | metadata, "spec": spec, "status": status})


RUNNING = {
    "state": "Running",
    "columns": {"pservers": "2/2", "trainers": "2/2"},
    "restarts": 1,
    "failures": 1,
    "conditions": [condition("Running", "ReplicasRunning", "all 4 replicas run")],
    "progress": {"percentage": 42, "step": 84, "totalSteps": 200, "loss": 0.3125, "etaSeconds": 150},
    "lastFailure": {"message": "digits-trainer-1 failed with exit code 1"},
    "roles": [{"role": "trainer", "replicas": 2, "active": 2}],
}


def test_all_there_is_to_say_about_one_job():
    assert details(summary(RUNNING), NOW) == [
        "digits (ParameterServer) in team: Running",
        "  all 4 replicas run",
        "  progress      42%, step 84 of 200, loss 0.3125, about 2m left",
        "  trainers      2 wanted, 2 active",
        "  restarts      1 (1 failures of 6 allowed)",
        "  last failure  digits-trainer-1 failed with exit code 1",
        "  age           5m",
    ]


def test_tables_are_told_with_their_rows_and_memory():
    tables = [
        {"name": "users", "rows": 1250000, "bytes": 193_750_000},
        {"name": "few", "rows": 3, "bytes": 700, "rowsOnDisk": 2, "hitPercentage": 79},
    ]
    lines = details(summary(RUNNING | {"progress": {"step": 3, "tables": tables}}), NOW)
    assert (
        "  tables        users 1250000 rows in 193.8 MB; few 3 rows in 700 B, 2 on disk, 79% of ids found"
        in lines
    )


def test_one_line_has_all_that_changes():
    assert summary(RUNNING).line() == (
        "digits Running pservers 2/2 trainers 2/2 42% loss 0.3125 restarts 1: all 4 replicas run"
    )


def test_a_job_that_nobody_has_looked_at_says_so():
    fresh = summary()
    assert (fresh.state, fresh.sentence, fresh.line()) == ("Pending", UNSEEN, f"digits Pending: {UNSEEN}")


def test_a_job_that_restarts_says_after_what_and_what_it_waits_for():
    told = [
        condition("Running", "Unschedulable", "no node fits", "False"),
        condition("Restarting", "ReplicaRestarting", "trainer-1 failed"),
    ]
    assert summary({"state": "Restarting", "conditions": told}).sentence == "trainer-1 failed; no node fits"


def test_a_status_of_a_later_version_is_shown_as_far_as_it_is_understood():
    later = summary({"state": "Paused", "conditions": "none"})
    assert (later.state, later.sentence) == ("Paused", "")


def test_a_change_that_the_operator_has_not_looked_at_is_told():
    stale = details(summary({**RUNNING, "observedGeneration": 1}, generation=2), NOW)
    assert stale[-1] == "  the operator has not processed the latest change of the spec yet"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-1, "0s"), (0, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (180000, "2d")],
)
def test_lengths_of_time(seconds: float, shown: str):
    assert age(seconds) == shown


def test_the_table_has_a_line_a_job():
    console = Console(width=120, record=True, force_terminal=False)
    console.print(table_of([summary(RUNNING), summary(name="b[old]")], NOW, everywhere=True))
    lines = [line.split() for line in console.export_text().splitlines()]
    numbers = ["2/2", "2/2", "42%", "0.3125", "2m", "1", "5m"]
    assert lines[1] == ["team", "digits", "Running", *numbers, "all", "4", "replicas", "run"]
    assert lines[2][:8] == ["team", "b[old]", "Pending", "-", "-", "-", "-", "-"]  # no mark-up
    assert lines[2][-1].endswith("…")  # what does not fit is why, and nothing else
