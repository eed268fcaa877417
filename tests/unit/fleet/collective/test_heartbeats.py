"""What one look at everybody's heartbeats says to all, and how little that is."""

from fleet.collective.heartbeats import Beat, Digest, Missed, Somewhere, digest_of
from fleet.collective.standing import Standing, Way

WAITING = Standing(4, 9, Way.EXCHANGE, "the average of step 8's gradients")


def test_a_heartbeat_travels_as_text():
    beat = Beat(7, WAITING)
    assert Beat.from_text(beat.to_text()) == beat


def test_a_digest_says_who_stands_where_and_who_is_missed():
    beats = {rank: Beat(10 + rank, WAITING if rank != 2 else Standing(4, 8)) for rank in range(5)}
    digest = digest_of(0, beats, {3: 60.0, 4: 5.0}, silent_seconds=10.0)
    assert digest == Digest(
        looker=0,
        number=10,
        ended=False,
        missed=[Missed(3, 13, 60.0), Missed(4, 14, 5.0)],
        silent=1,
        places=[Somewhere(WAITING, 3, [0, 1, 4, 3]), Somewhere(Standing(), 1, [2])],
    )
    assert Digest.from_text(digest.to_text()) == digest
    assert digest.aged(2.5).missed == [Missed(3, 13, 62.5), Missed(4, 14, 7.5)]


def test_a_digest_is_short_whatever_the_trainers_do():
    beats = {
        rank: Beat(rank, Standing(rank, rank, Way.CALL, f"the sum of int64[{rank}]")) for rank in range(2000)
    }
    digest = digest_of(0, beats, {rank: 100.0 + rank for rank in range(1, 2000)}, silent_seconds=10.0)
    assert len(digest.to_text()) < 3000
    assert digest.silent == 1999
    assert [each.rank for each in digest.missed] == list(range(1992, 2000)), (
        "those that are missed for longest"
    )
    assert sum(each.alive for each in digest.places) == 1
