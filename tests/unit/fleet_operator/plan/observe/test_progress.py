"""How far a job is: what its trainer 0 tells, and weights that are no numbers at the end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from fleet_operator.api import JobProgress, TableStatistics
from fleet_operator.plan.observe.progress import (
    MAX_ETA_SECONDS,
    Progress,
    job_progress,
    parse_progress,
    trainers_with_non_finite,
)
from tests.support.plans import Story, at, ended, pserver, trainer

if TYPE_CHECKING:
    from fleet_operator.plan.model import ObservedPod


WHOLE = {
    "role": "TRAINER",
    "index": 0,
    "step": 12,
    "totalSteps": 100,
    "loss": 0.31,
    "samples": 1536,
    "samplesPerSecond": 812.4,
    "metrics": {"test_accuracy": 0.97, "absent": None},
    "history": [[1, 2.0], [12, 0.31]],
    "counters": {"bytes_sent": 3, "steps_past_the_others": 7},
    "tables": [
        {
            "name": "users",
            "rows": 1000,
            "bytes": 90000,
            "rowsOnDisk": 40,
            "hitPercentage": 79,
            "shardSkew": 1.25,
            "found": 3,
        }
    ],
    "unknown": [],
}


USERS = TableStatistics(
    name="users", rows=1000, bytes=90000, rows_on_disk=40, hit_percentage=79, shard_skew=1.25
)


PARSED = Progress(12, 100, 0.31, 1536, 812.4, {"test_accuracy": 0.97}, {1: 2.0, 12: 0.31}, 7, tables=(USERS,))


def test_a_whole_progress():
    assert parse_progress(json.dumps(WHOLE)) == PARSED


@pytest.mark.parametrize("text", ["", "trained", "[1]", "3", '{"other": 1}', "{", "[" * 100_000])
def test_other_last_words_are_no_progress(text):
    assert parse_progress(text) is None


@pytest.mark.parametrize(
    "odd",
    [
        {"step": "x", "loss": [], "samples": 1.5, "metrics": [1], "history": {}},
        {
            "step": None,
            "loss": True,
            "history": [[1], "x", [1, None], [None, 1], [1.5, 2]],
            "metrics": {"a": "b"},
        },
        {"step": -1, "totalSteps": 2**60, "samples": 10**30, "counters": {"steps_past_the_others": "x"}},
        {"step": None, "tables": {"name": "users"}},
        {
            "step": None,
            "tables": ["users", {"name": 3, "rows": 1, "bytes": 1}, {"name": "users", "rows": -1}],
        },
    ],
)
def test_odd_values_are_left_out(odd):
    assert parse_progress(json.dumps(odd)) == Progress()


def test_the_name_of_a_metric_can_be_printed_and_encoded():
    progress = parse_progress('{"step": 1, "metrics": {"a\\ud800\\u001b[2J": 1}}')
    assert progress == Progress(step=1, metrics={"a??[2J": 1.0})


def test_not_a_number_is_left_out():
    assert parse_progress('{"step": 1, "loss": NaN}') == Progress(step=1)


HUGE = 10**400  # a whole number that no float holds


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param({"loss": HUGE}, id="loss"),
        pytest.param({"samplesPerSecond": HUGE}, id="rate"),
        pytest.param({"metrics": {"accuracy": HUGE}}, id="metrics"),
        pytest.param({"history": [[1, HUGE]]}, id="history"),
        pytest.param({"totalSteps": HUGE, "samples": -HUGE}, id="counts"),
    ],
)
def test_a_number_beyond_all_floats_is_left_out(odd):
    assert parse_progress(json.dumps({"step": 1, **odd})) == Progress(step=1)


def test_the_status_tells_of_ten_tables_at_most_and_of_names_that_end():
    many = [{"name": "n" * 200, "rows": each, "bytes": 1} for each in range(20)]
    told = job_progress(parse_progress(json.dumps({"step": 1, "tables": many})) or Progress())
    assert told is not None
    assert told.tables is not None
    assert [(len(each.name), each.rows) for each in told.tables] == [(100, each) for each in range(10)]
    assert "tables" not in (job_progress(Progress(step=1)) or told).model_dump(exclude_none=True)


def test_a_last_word_beyond_all_floats_does_not_keep_a_job_from_finishing():
    story = Story()
    last = json.dumps({"step": 9, "loss": HUGE})
    story.sees(pserver(0), pserver(1), ended(trainer(0), message=last), ended(trainer(1)))
    assert story.job.status.state == "Succeeded"
    assert story.job.status.progress == JobProgress(step=9)


def test_an_earlier_snapshot_lends_its_points_and_its_rate():
    earlier = Progress(step=2, samples_per_second=10.0, history={1: 3.0, 2: 2.0})
    assert Progress(step=3, loss=1.0, history={1: 3.5, 3: 1.0}).after(earlier) == Progress(
        step=3, loss=1.0, samples_per_second=10.0, history={1: 3.5, 2: 2.0, 3: 1.0}
    )


@pytest.mark.parametrize(
    ("progress", "pace", "told"),
    [
        pytest.param(
            Progress(step=50, total_steps=200, loss=0.123456789),
            2.0,
            JobProgress(percentage=25, step=50, total_steps=200, loss=0.123457, eta_seconds=75),
            id="a-quarter-done",
        ),
        pytest.param(
            Progress(step=199, total_steps=200),
            None,
            JobProgress(percentage=99, step=199, total_steps=200),
            id="all-but-the-last-step-is-not-all",
        ),
        pytest.param(
            Progress(step=200, total_steps=200),
            2.0,
            JobProgress(percentage=100, step=200, total_steps=200),
            id="done-has-nothing-left",
        ),
        pytest.param(Progress(step=7), 2.0, JobProgress(step=7), id="without-a-number-of-steps"),
        pytest.param(
            Progress(step=9, total_steps=3),
            2.0,
            JobProgress(percentage=100, step=9, total_steps=3),
            id="more-than-was-said",
        ),
        pytest.param(
            Progress(step=0, total_steps=0),
            2.0,
            JobProgress(step=0, total_steps=0),
            id="of-none",
        ),
        pytest.param(
            Progress(step=0, total_steps=2**52),
            1e-300,
            JobProgress(percentage=0, step=0, total_steps=2**52, eta_seconds=MAX_ETA_SECONDS),
            id="an-estimate-has-an-end",
        ),
        pytest.param(Progress(loss=1.0), 2.0, None, id="no-steps-counted"),
    ],
)
def test_what_the_status_tells(progress, pace, told):
    assert job_progress(progress, steps_per_second=pace) == told


HEARD = JobProgress(percentage=25, step=1, total_steps=4, eta_seconds=30)


RUNNING = (pserver(0), pserver(1), trainer(0), trainer(1))


def test_what_trainer_0_says_is_in_the_status_and_stays_there():
    story = Story()
    story.sees(*RUNNING, progress=HEARD)
    assert story.job.status.progress == HEARD
    assert not story.plan.urgent or story.plan.events  # told with the start
    story.sees(*RUNNING, after=5)
    assert story.job.status.progress == HEARD


def test_progress_alone_is_nothing_urgent():
    story = Story()
    story.sees(*RUNNING)
    story.sees(*RUNNING, after=1, progress=HEARD)
    assert not story.plan.urgent


def test_a_restart_of_the_job_begins_without_progress():
    story = Story(failurePolicy={"action": "RestartJob"})
    story.sees(*RUNNING, progress=HEARD)
    story.sees(*RUNNING[:3], ended(trainer(1), 1), after=5)
    assert story.job.status.progress is None


def test_a_restart_of_one_replica_keeps_what_was_known():
    story = Story()
    story.sees(*RUNNING, progress=HEARD)
    story.sees(*RUNNING[:3], ended(trainer(1), 1), after=5)
    assert story.job.status.progress == HEARD


def test_the_last_words_of_trainer_0_are_the_last_word():
    story = Story()
    story.sees(*RUNNING, progress=HEARD)
    last = ended(trainer(0), message='{"step": 4, "totalSteps": 4, "loss": 0.5}', finished_at=at(7))
    story.sees(*RUNNING[:2], last, ended(trainer(1)), after=8)
    assert story.job.status.progress == JobProgress(
        percentage=100, step=4, total_steps=4, loss=0.5, time=at(7)
    )


def test_a_job_that_has_failed_estimates_nothing():
    story = Story(failurePolicy={"action": "FailJob"})
    story.sees(*RUNNING, progress=HEARD)
    story.sees(*RUNNING[:3], ended(trainer(1), 1), after=5)
    assert story.job.status.progress == HEARD.model_copy(update={"eta_seconds": None})


def test_a_job_that_is_suspended_has_no_progress():
    story = Story()
    story.sees(*RUNNING, progress=HEARD)
    story.edit(suspend=True)
    story.sees(*RUNNING, after=5)
    assert story.job.status.progress is None


def test_what_a_terminal_or_the_status_could_not_take_of_a_tables_name_is_replaced():
    told = parse_progress(r'{"step": 1, "tables": [{"name": "\ud800 \u001b[2Jé", "rows": 1, "bytes": 1}]}')
    assert told is not None
    assert [table.name for table in told.tables] == ["? ?[2Jé"]


LOST = '{"step": 9, "counters": {"non_finite_parameters": 2}}'


WELL = '{"step": 9, "counters": {}}'


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param([ended(trainer(2), message=LOST), ended(trainer(0), message=LOST)], [0, 2], id="each"),
        pytest.param([ended(trainer(0), message=WELL)], [], id="not-one-that-counts-none"),
        pytest.param([ended(trainer(0))], [], id="not-one-that-says-nothing"),
        pytest.param([ended(trainer(0), message="Killed")], [], id="not-one-with-other-words"),
        pytest.param([ended(trainer(0), 1, message=LOST)], [], id="not-one-that-has-failed"),
        pytest.param([trainer(0, message=LOST)], [], id="not-one-that-still-runs"),
        pytest.param([ended(pserver(0), message=LOST)], [], id="not-a-parameter-server"),
    ],
)
def test_trainers_with_non_finite(pods: list[ObservedPod], expected):
    assert trainers_with_non_finite(pods) == expected


def test_weights_that_are_no_numbers_are_no_success_without_a_word():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    story.sees(pserver(0), pserver(1), ended(trainer(0), message=WELL), ended(trainer(1), message=LOST))
    told = story.job.status.condition("Complete")
    assert told is not None
    assert (
        told.message
        == "all 2 trainers have completed; but trainer 1 ended with NaN or infinity in the weights"
    )
