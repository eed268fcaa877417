"""Clean-pod policy: which pods a finished job leaves behind, and when the others go."""

import pytest

from fleet_operator.api import CleanPodPolicy, JobState
from fleet_operator.plan.cleanup import cleanup_at, to_clean
from tests.support.plans import T0, Story, at, ended, pserver, trainer

RUNS, DONE, FAILED = pserver(0), ended(trainer(0)), ended(trainer(1), 1)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param(CleanPodPolicy.RUNNING, (RUNS,), id="running-leaves-ended-pods-for-their-logs"),
        pytest.param(CleanPodPolicy.ALL, (RUNS, DONE, FAILED), id="all-leaves-none"),
        pytest.param(CleanPodPolicy.NONE, (), id="none-leaves-all"),
    ],
)
def test_to_clean(policy, expected):
    assert to_clean(policy, (RUNS, DONE, FAILED)) == expected


@pytest.mark.parametrize(
    ("state", "any_active", "expected"),
    [
        pytest.param(JobState.SUCCEEDED, True, at(30), id="after-a-success-servers-get-time-to-exit"),
        pytest.param(JobState.SUCCEEDED, False, T0, id="unless-all-have-exited"),
        pytest.param(JobState.FAILED, True, T0, id="after-a-failure-nobody-has-anything-left-to-do"),
    ],
)
def test_cleanup_at(state, any_active, expected):
    assert cleanup_at(state, T0, any_active=any_active) == expected


def finish(policy: str) -> Story:
    story = Story(runPolicy={"cleanPodPolicy": policy})
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    story.sees(pserver(0), pserver(1), ended(trainer(0)), ended(trainer(1)), after=60)
    return story


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param("Running", ["delete digits-pserver-0 0.0"], id="servers-never-burn-resources"),
        pytest.param(
            "All",
            [
                "delete digits-pserver-0 0.0",
                "delete digits-pserver-1 0.0",
                "delete digits-trainer-0 0.0",
                "delete digits-trainer-1 0.0",
                "delete Service digits",
            ],
            id="all-takes-the-service-too",
        ),
        pytest.param("None", [], id="none-keeps-even-what-runs"),
    ],
)
def test_a_server_that_does_not_exit_by_itself(policy, expected):
    story = finish(policy)
    pods = (pserver(0), ended(pserver(1)), ended(trainer(0)), ended(trainer(1)))
    early = story.sees(*pods, after=89)
    assert "look again after 1 s" in early
    assert not any(line.startswith("delete") for line in early)
    assert [line for line in story.sees(*pods, after=90) if line.startswith("delete")] == expected


def test_a_server_that_is_stopped_after_the_success_has_not_failed():
    story = finish("Running")
    pods = (ended(pserver(0), 143), ended(pserver(1), 143), ended(trainer(0)), ended(trainer(1)))
    assert story.sees(*pods, after=95)[0] == "Succeeded pservers 0/2 trainers 2/2 restarts 0 failures 0"


def test_a_pod_of_an_older_attempt_goes_whatever_the_policy():
    story = Story(runPolicy={"cleanPodPolicy": "None"}, successPolicy="RankZero")
    story.sees(pserver(0), pserver(1), trainer(0), ended(trainer(1), 1))
    lines = story.sees(pserver(0), pserver(1), ended(trainer(0)), ended(trainer(1), 1), after=1)
    assert [line for line in lines if line.startswith("delete")] == ["delete digits-trainer-1 0.0"]


def test_a_pod_that_runs_is_cleaned_up_only_as_it_was_seen_for_it_may_end_by_itself_meanwhile():
    story = Story()
    done = (ended(pserver(0)), ended(trainer(0)), ended(trainer(1)))
    story.sees(*done, pserver(1, version="7"))
    lines = story.sees(*done, pserver(1, version="8"), after=30)
    assert "delete digits-pserver-1 0.0 at version 8" in lines
    older = trainer(0, "0.0", version="9")
    restarted = Story()
    restarted.sees(pserver(0), pserver(1), ended(older, 1), trainer(1))
    assert "delete digits-trainer-0 0.0" in restarted.sees(
        pserver(0), pserver(1), ended(older, 1), trainer(1)
    )
