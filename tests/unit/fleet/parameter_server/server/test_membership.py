"""Which trainers a server counts on: joins, fencing, silence and loss, by a clock that the test turns."""

from dataclasses import replace

import pytest

from fleet.errors import AlreadyJoinedError, ConfigurationError, PeerLostError
from fleet.parameter_server.server.membership import (
    LOST,
    NOT_JOINED,
    SILENT,
    Absence,
    Membership,
    describe_absences,
    loss_of,
    loss_of_missed,
)
from fleet.parameter_server.settings import Settings

SETTINGS = Settings(heartbeat_seconds=2.0, deadline_seconds=100.0)  # silent after 10 s


@pytest.fixture
def members() -> Membership:
    return Membership(2, SETTINGS, started=0.0)


def test_nobody_has_joined_at_first(members):
    assert members.live == (0, 1)
    assert members.completed == ()
    assert members.attempt(0) == -1


def test_before_the_first_join_the_server_is_patient(members):
    assert members.absences(50.0) == [
        Absence(0, 0.0, NOT_JOINED, 1000.0),
        Absence(1, 0.0, NOT_JOINED, 1000.0),
    ]


def test_after_the_first_join_the_deadline_of_the_others_runs(members):
    members.admit(0, 0, now=40.0)
    assert members.absences(41.0) == [Absence(1, 40.0, NOT_JOINED, 140.0)]


def test_who_has_never_joined_has_the_time_for_starting_and_who_is_lost_has_not():
    members = Membership(2, replace(SETTINGS, start_deadline_seconds=3600), started=0.0)
    assert members.absences(1.0)[0].deadline == 3600.0
    members.admit(0, 0, now=40.0)
    members.connected(0, 40.0)
    members.lost(0, 50.0)
    assert members.absences(51.0) == [
        Absence(0, 50.0, LOST, 150.0),
        Absence(1, 40.0, NOT_JOINED, 3640.0),
    ]


def test_the_servers_of_an_elastic_job_wait_no_longer_for_who_never_joins():
    settings = replace(SETTINGS, start_deadline_seconds=3600, max_trainers=4)
    members = Membership(2, settings, started=0.0)
    members.admit(0, 0, now=40.0)
    assert members.absences(41.0) == [Absence(1, 40.0, NOT_JOINED, 140.0)]


def test_a_trainer_that_beats_is_present(members):
    members.admit(0, 0, now=0.0)
    members.admit(1, 0, now=0.0)
    for now in range(0, 60, 2):
        members.heard(0, now)
        members.heard(1, now)
    assert members.absences(60.0) == []


def test_a_trainer_is_silent_after_five_beats_and_lost_the_deadline_later(members):
    members.admit(0, 0, now=0.0)
    members.admit(1, 0, now=0.0)
    members.heard(0, 9.0)
    assert members.absences(9.9) == []
    assert members.absences(10.0) == [Absence(1, 0.0, SILENT, 110.0)]


def test_a_lost_connection_counts_at_once_even_if_the_trainer_beats(members):
    members.admit(0, 0, now=0.0)
    members.admit(1, 0, now=0.0)
    members.lost(1, 5.0)
    members.heard(1, 6.0)
    assert members.absences(6.0) == [Absence(1, 5.0, LOST, 105.0)]


def test_a_trainer_that_comes_back_is_present_again(members):
    members.admit(0, 0, now=0.0)
    members.admit(1, 0, now=0.0)
    members.lost(1, 5.0)
    members.admit(1, 1, now=6.0)
    assert members.absences(7.0) == []
    assert members.attempt(1) == 1


def test_a_completed_trainer_is_never_absent(members):
    members.admit(0, 0, now=0.0)
    members.admit(1, 0, now=0.0)
    members.complete(1)
    members.lost(1, 5.0)
    assert (members.live, members.completed) == ((0,), (1,))
    assert members.absences(9.0) == []


def test_a_completed_trainer_may_come_back(members):
    members.admit(1, 0, now=0.0)
    members.complete(1)
    members.admit(1, 0, now=1.0)
    assert members.live == (0, 1)


@pytest.mark.parametrize("trainer", [2, 7])
def test_an_id_out_of_range_names_the_variables(members, trainer):
    with pytest.raises(
        ConfigurationError, match=rf"trainer id {trainer} .* expected 0 to 1.*PADDLE_TRAINER_ID"
    ):
        members.admit(trainer, 0, now=0.0)


def test_two_processes_cannot_be_the_same_trainer(members):
    members.admit(0, 3, now=0.0)
    members.connected(0, now=0.0)
    with pytest.raises(AlreadyJoinedError, match=r"already joined as trainer 0.*attempt 3"):
        members.admit(0, 3, now=9.0)


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param(lambda members: members.lost(0, 1.0), id="lost"),
        pytest.param(lambda _: None, id="silent"),
    ],
)
def test_the_same_attempt_may_return_once_the_first_is_gone(members, gone):
    members.admit(0, 3, now=0.0)
    members.connected(0, now=0.0)
    gone(members)
    members.admit(0, 3, now=10.0)


def test_a_join_whose_answer_was_lost_may_be_repeated(members):
    members.admit(0, 3, now=0.0)
    members.admit(0, 3, now=0.1)


def test_a_connection_that_is_back_is_not_waited_for(members):
    members.admit(0, 3, now=0.0)
    members.admit(1, 0, now=0.0)
    members.lost(0, 1.0)
    assert [absence.trainer for absence in members.absences(2.0)] == [0]
    members.connected(0, now=2.0)
    members.heard(1, 2.0)
    assert members.absences(2.0) == []


def test_a_lower_attempt_is_fenced(members):
    members.admit(0, 3, now=0.0)
    members.lost(0, 1.0)
    with pytest.raises(AlreadyJoinedError, match="attempt 2, but its attempt 3 has already joined"):
        members.admit(0, 2, now=2.0)


@pytest.fixture
def elastic() -> Membership:
    """Give the members of a job that was started with two trainers and may come to have four."""
    return Membership(2, replace(SETTINGS, max_trainers=4), started=0.0)


def test_a_trainer_of_an_elastic_job_counts_from_its_first_join_on(elastic):
    assert (elastic.live, elastic.attempt(3)) == ((0, 1), -1)
    elastic.admit(3, 0, now=0.0)
    assert elastic.live == (0, 1, 3)
    elastic.check_joined(3, 0)
    with pytest.raises(AlreadyJoinedError, match="trainer 2 with attempt 0 has not joined"):
        elastic.check_joined(2, 0)


def test_an_id_beyond_the_most_names_the_variables(elastic):
    with pytest.raises(ConfigurationError, match=r"trainer id 4 .* expected 0 to 3.*FLEET_MAX_TRAINERS"):
        elastic.admit(4, 0, now=0.0)


def test_an_elastic_job_ends_once_all_that_joined_are_done_or_given_up(elastic):
    for trainer in range(3):
        elastic.admit(trainer, 0, now=0.0)
    elastic.complete(0)
    elastic.lost(2, 1.0)
    assert elastic.live == (1, 2)
    elastic.give_up(2)
    elastic.complete(1)
    assert (elastic.live, elastic.gone, elastic.missed) == ((), (2,), ())


def test_an_elastic_job_that_all_have_left_has_not_ended_well(elastic):
    elastic.admit(0, 0, now=0.0)
    elastic.give_up(0)
    elastic.give_up(1)
    assert elastic.missed == (0, 1)


def test_a_job_with_a_fixed_number_misses_whom_it_has_lost(members):
    members.admit(0, 0, now=0.0)
    members.give_up(1)
    members.complete(0)
    assert members.missed == (1,)


def test_who_was_given_up_may_come_back_while_another_trains(elastic):
    elastic.admit(0, 0, now=0.0)
    elastic.give_up(1)
    elastic.admit(1, 1, now=1.0)
    assert elastic.live == (0, 1)


def test_who_comes_after_all_others_have_left_is_too_late(elastic):
    elastic.admit(0, 0, now=0.0)
    elastic.give_up(1)
    elastic.complete(0)
    with pytest.raises(PeerLostError, match="trainer 2 joined after every other trainer had left"):
        elastic.admit(2, 0, now=1.0)


HIGHEST = (1 << 32) - 1


def test_an_attempt_that_nobody_can_have_issued_takes_no_trainers_place(members):
    members.admit(0, 0, now=0.0)
    with pytest.raises(ConfigurationError, match=f"attempt {HIGHEST}, expected at most 1005.*FLEET_RESTARTS"):
        members.admit(0, HIGHEST, now=5.0)
    assert members.attempt(0) == 0


def test_nor_does_it_join_first(members):
    with pytest.raises(ConfigurationError, match="no replica can have been started so often"):
        members.admit(0, HIGHEST, now=0.0)


@pytest.mark.parametrize(
    "attempt",
    [
        pytest.param(1, id="restarted-once"),
        pytest.param(60, id="restarted-often-while-nobody-reached-this-server"),
    ],
)
def test_who_was_restarted_takes_its_own_place(members, attempt):
    members.admit(0, 0, now=0.0)
    members.admit(0, attempt, now=1.0)
    assert members.attempt(0) == attempt


def test_a_server_that_knows_nobody_takes_who_has_been_restarted_for_months(members):
    members.admit(0, 4_000_000, now=0.0)
    members.admit(0, 4_000_001, now=9.0)
    assert members.attempt(0) == 4_000_001


def test_one_restart_a_second_is_believed_for_as_long_as_the_server_lives(members):
    members.admit(0, 0, now=0.0)
    members.admit(0, 1_000_000, now=1_000_000.0)
    assert members.attempt(0) == 1_000_000


def test_no_join_makes_room_for_another_with_a_higher_attempt(members):
    members.admit(0, 0, now=0.0)
    members.admit(0, 1000, now=0.0)
    with pytest.raises(ConfigurationError, match="expected at most 1000"):
        members.admit(0, 1001, now=0.0)


def test_who_has_never_joined_is_told_with_the_deadline_for_starting_and_who_is_lost_with_the_other():
    never = str(loss_of(Absence(1, 40.0, NOT_JOINED, 3640.0), 3641.0, step=0, lost_seconds=180.0))
    assert "trainer 1 did not join within 3601 s" in never
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
