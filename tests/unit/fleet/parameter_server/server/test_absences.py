"""Who is not heard, in plain sentences; from when on, `test_membership.py` shows."""

import pytest

from fleet.parameter_server.server.absences import (
    LOST,
    NOT_JOINED,
    SILENT,
    Absence,
    describe_absences,
    loss_of,
    loss_of_missed,
)


def test_who_has_never_joined_is_told_with_the_deadline_for_starting_and_who_is_lost_with_the_other():
    never = str(loss_of(Absence(1, 40.0, NOT_JOINED, 3640.0), 3641.0, step=0, lost_seconds=180.0))
    assert "trainer 1 has not joined within 3601 s" in never
    assert "runPolicy.pendingDeadlineSeconds" in never
    assert "180000" not in never, "the deadline of one that is lost is not what is over"
    lost = str(loss_of(Absence(1, 40.0, LOST, 220.0), 221.0, step=7, lost_seconds=180.0))
    assert "lost its connection 181 s ago, at step 7" in lost
    assert "FLAGS_rpc_deadline is 180000 ms" in lost


@pytest.mark.parametrize(
    ("reasons", "sentence"),
    [
        pytest.param([NOT_JOINED, NOT_JOINED], "waiting for trainers 0 and 1 to join", id="two-of-one-kind"),
        pytest.param([LOST], "waiting for trainer 0 to connect again", id="a-lost-connection"),
        pytest.param([SILENT], "waiting for a sign of life of trainer 0", id="silence"),
        pytest.param(
            [LOST, NOT_JOINED, LOST],
            "waiting for trainer 1 to join and trainers 0 and 2 to connect again",
            id="a-kind-after-the-other",
        ),
        pytest.param(
            [NOT_JOINED] * 100,
            "waiting for trainers 0, 1, 2, 3, 4 and 95 more to join",
            id="more-than-a-sentence-holds",
        ),
    ],
)
def test_who_is_waited_for_is_one_plain_sentence(reasons, sentence):
    absences = [Absence(trainer, 0.0, reason, 100.0) for trainer, reason in enumerate(reasons)]
    assert describe_absences(absences) == sentence


@pytest.mark.parametrize(
    ("missed", "completed", "sentence"),
    [
        ((1,), (0,), "trainer 1 vanished for good; every other trainer has completed"),
        ((0,), (), "trainer 0 vanished for good, before any trainer had completed"),
        ((0, 1), (), "trainers 0 and 1 vanished for good, before any trainer had completed"),
    ],
)
def test_who_is_missed_at_the_end_is_told_with_what_became_of_the_others(missed, completed, sentence):
    assert str(loss_of_missed(missed, completed)) == sentence
