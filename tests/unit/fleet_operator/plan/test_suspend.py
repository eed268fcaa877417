"""Suspension: no pod runs, and the job starts anew when it is resumed."""

from tests.support.plans import Story, ended, pserver, trainer

HELD = "runPolicy.suspend is true"


def test_a_job_created_suspended_creates_nothing():
    story = Story(runPolicy={"suspend": True})
    assert story.sees(service=False) == [
        "Suspended pservers 0/2 trainers 0/2 restarts 0 failures 0",
        f"PodsCreated False Suspended: {HELD}",
        f"Running False Suspended: {HELD}",
        f"Suspended True Suspended: {HELD}: no pod of this job runs until it is false",
        f"tell Normal Suspended: {HELD}: no pod of this job runs until it is false",
    ]
    assert story.job.status.start_time is None


def test_a_suspended_job_loses_its_pods_and_begins_anew_when_resumed():
    story = Story()
    story.sees(pserver(0), pserver(1), ended(trainer(0)), trainer(1))
    story.edit(suspend=True)
    lines = story.sees(pserver(0), pserver(1), ended(trainer(0)), trainer(1), after=5)
    assert [line for line in lines if line.startswith("delete")] == [
        "delete digits-pserver-0 0.0",
        "delete digits-pserver-1 0.0",
        "delete digits-trainer-0 0.0",
        "delete digits-trainer-1 0.0",
    ]
    story.sees(after=10)
    story.edit(suspend=False)
    lines = story.sees(after=20)
    assert lines[0] == "Pending pservers 0/2 trainers 0/2 restarts 0 failures 0"
    assert lines[3:] == [
        "Suspended False Resumed: runPolicy.suspend is false",
        "create digits-pserver-0 1.0",
        "create digits-pserver-1 1.0",
        "tell Normal Resumed: runPolicy.suspend is false",
    ]


def test_a_job_that_has_finished_cannot_be_suspended():
    story = Story()
    done = (ended(pserver(0)), ended(pserver(1)), ended(trainer(0)), ended(trainer(1)))
    story.sees(*done)
    story.edit(suspend=True)
    story.sees(*done, after=5)
    assert story.job.status.state == "Succeeded"


def test_suspending_while_restarting_ends_the_restart():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), ended(trainer(1), 1))
    story.edit(suspend=True)
    assert "Restarting False Suspended: runPolicy.suspend is true" in story.sees(after=1)
