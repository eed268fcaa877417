"""The states of trainers in heartbeats, deadlocks between them, and reports on all."""

import pytest

from fleet.collective.heartbeats import Absence, Cohort, Heartbeat, Report, TrainerState, WaitKind, report_of

WAITING = TrainerState(4, 9, WaitKind.EXCHANGE, "the average of step 8's gradients")


def test_a_heartbeat_travels_as_text():
    beat = Heartbeat(7, WAITING)
    assert Heartbeat.from_text(beat.to_text()) == beat


def test_a_report_has_cohorts_and_absences():
    beats = {rank: Heartbeat(10 + rank, WAITING if rank != 2 else TrainerState(4, 8)) for rank in range(5)}
    report = report_of(0, beats, {3: 60.0, 4: 5.0}, silent_seconds=10.0)
    assert report == Report(
        observer=0,
        number=10,
        ended=False,
        absences=[Absence(3, 13, 60.0), Absence(4, 14, 5.0)],
        silent=1,
        cohorts=[Cohort(WAITING, 3, [0, 1, 4, 3]), Cohort(TrainerState(), 1, [2])],
    )
    assert Report.from_text(report.to_text()) == report
    assert report.aged(2.5).absences == [Absence(3, 13, 62.5), Absence(4, 14, 7.5)]


def test_a_report_of_many_trainers_is_short():
    beats = {
        rank: Heartbeat(rank, TrainerState(rank, rank, WaitKind.CALL, f"the sum of int64[{rank}]"))
        for rank in range(2000)
    }
    report = report_of(0, beats, {rank: 100.0 + rank for rank in range(1, 2000)}, silent_seconds=10.0)
    assert len(report.to_text()) < 3000
    assert report.silent == 1999
    assert [each.rank for each in report.absences] == list(range(1992, 2000)), (
        "those that are missed for longest"
    )
    assert sum(each.alive for each in report.cohorts) == 1


def test_a_state_travels_as_text():
    standing = TrainerState().begin("the average of step 0's gradients", WaitKind.EXCHANGE).end()
    standing = standing.begin("a barrier", WaitKind.CALL)
    assert standing == TrainerState(1, 1, WaitKind.CALL, "a barrier")
    assert TrainerState.from_text(standing.to_text()) == standing


EXCHANGING = TrainerState(calls=4, exchanges=3, kind=WaitKind.EXCHANGE)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        pytest.param(
            TrainerState(5, 2, WaitKind.CALL), True, id="a-call-that-comes-after-fewer-backward-passes"
        ),
        pytest.param(TrainerState(5, 3, WaitKind.CALL), False, id="it-has-left-the-exchange-already"),
        pytest.param(TrainerState(4, 2, WaitKind.CALL), False, id="it-still-leaves-a-call-that-has-been"),
        pytest.param(TrainerState(5, 2, WaitKind.OTHER), False, id="it-computes"),
        pytest.param(TrainerState(4, 2, WaitKind.EXCHANGE), False, id="it-still-leaves-the-exchange-before"),
    ],
)
def test_a_call_and_an_exchange_may_deadlock(other, expected):
    assert EXCHANGING.deadlocks_with(other) is expected
    assert other.deadlocks_with(EXCHANGING) is expected
