from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_operator.engine import WorkQueue
from fleet_operator.engine.queue import AHEAD_IN_A_ROW


@pytest.fixture
def queue() -> WorkQueue[str]:
    return WorkQueue(backoff_seconds=1.0, backoff_limit_seconds=8.0)


def test_a_key_added_many_times_is_taken_once(queue: WorkQueue[str]):
    for _ in range(3):
        queue.add("a")
    assert (queue.take(0), queue.take(0)) == ("a", None)


def test_keys_come_in_the_order_in_which_they_were_added(queue: WorkQueue[str]):
    for key in "abca":
        queue.add(key)
    assert [queue.take(0) for _ in range(4)] == ["a", "b", "c", None]


def test_keys_that_go_ahead_come_first_and_keep_nobody_from_their_turn():
    queue: WorkQueue[str] = WorkQueue(ahead=str.isupper)
    several = [chr(ord("A") + number) for number in range(AHEAD_IN_A_ROW + 2)]
    for key in ("a", "b", *several, "c"):
        queue.add(key)
    assert len(queue) == len(several) + 3
    taken = [queue.take(0) for _ in range(len(several) + 4)]
    assert taken == [*several[:AHEAD_IN_A_ROW], "a", *several[AHEAD_IN_A_ROW:], "b", "c", None]


def test_only_so_many_of_the_others_are_worked_on_at_once():
    queue: WorkQueue[str] = WorkQueue(ahead=str.isupper, others_at_once=2)
    for key in ("a", "b", "c", "A"):
        queue.add(key)
    assert [queue.take(0) for _ in range(4)] == ["A", "a", "b", None]
    queue.add("B")
    assert [queue.take(0) for _ in range(2)] == ["B", None]
    queue.failed("a", 0)
    assert [queue.take(0) for _ in range(2)] == ["c", None]
    queue.done("b")
    assert queue.take(1) == "a"


def test_a_turn_that_has_no_room_does_not_keep_the_others_from_theirs():
    queue: WorkQueue[str] = WorkQueue(ahead=str.isupper, others_at_once=1)
    several = [chr(ord("A") + number) for number in range(AHEAD_IN_A_ROW + 2)]
    queue.add("a")
    queue.take(0)
    for key in ("b", *several):
        queue.add(key)
    assert [queue.take(0) for _ in range(len(several) + 1)] == [*several, None]


def test_a_key_goes_ahead_as_it_is_when_it_is_added():
    known: set[str] = set()
    queue: WorkQueue[str] = WorkQueue(ahead=known.__contains__)
    queue.add("a")
    queue.take(0)
    queue.add("a")
    queue.add("b")
    known.add("a")
    queue.done("a")
    assert [queue.take(0) for _ in range(3)] == ["a", "b", None]


def test_a_key_that_changes_during_its_pass_is_taken_again_after_it(queue: WorkQueue[str]):
    queue.add("a")
    queue.take(0)
    queue.add("a")
    assert queue.take(0) is None
    queue.done("a")
    assert queue.take(0) == "a"


def test_a_delayed_key_waits_for_its_moment(queue: WorkQueue[str]):
    queue.add_at("a", 5)
    assert (queue.take(4.9), queue.next_due()) == (None, 5)
    assert (queue.take(5), queue.next_due()) == ("a", None)


def test_of_two_delays_the_earlier_counts(queue: WorkQueue[str]):
    queue.add_at("a", 5)
    queue.add_at("a", 3)
    queue.add_at("a", 7)
    assert queue.next_due() == 3
    assert queue.take(3) == "a"
    queue.done("a")
    assert (queue.take(9), queue.next_due()) == (None, None)


def test_taking_a_key_ends_its_delay(queue: WorkQueue[str]):
    queue.add_at("a", 5)
    queue.add("a")
    queue.take(0)
    queue.done("a")
    assert queue.take(9) is None


def test_a_key_that_fails_waits_twice_as_long_each_time_up_to_the_limit(queue: WorkQueue[str]):
    waits = []
    now = 0.0
    queue.add("a")
    for _ in range(6):
        assert queue.take(now) == "a"
        waits.append(queue.failed("a", now))
        assert queue.take(now + waits[-1] - 0.1) is None
        now += waits[-1]
    assert waits == [1, 2, 4, 8, 8, 8]


def test_a_pass_that_goes_well_forgets_the_failures(queue: WorkQueue[str]):
    queue.add("a")
    queue.take(0)
    queue.failed("a", 0)
    queue.take(1)
    queue.done("a")
    queue.add("a")
    queue.take(1)
    assert queue.failed("a", 1) == 1


def test_one_keys_failures_do_not_slow_another(queue: WorkQueue[str]):
    queue.add("a")
    queue.take(0)
    queue.failed("a", 0)
    queue.add("b")
    assert queue.take(0) == "b"


def test_an_event_ends_the_wait_of_a_key_that_failed(queue: WorkQueue[str]):
    queue.add("a")
    queue.take(0)
    queue.failed("a", 0)
    queue.add("a")
    assert queue.take(0) == "a"


def test_thousands_of_failures_overflow_nothing():
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    now = 0.0
    for _ in range(3000):
        queue.take(now)
        wait = queue.failed("a", now)
        now += wait
    assert wait == 60


def test_news_of_a_key_that_rests_waits_and_is_looked_at_once(queue: WorkQueue[str]):
    queue.add("a")
    queue.take(0)
    queue.add("a")  # while it is worked on
    queue.done("a", rests_until=3)
    queue.add("a")  # and afterwards
    assert (queue.take(2.9), queue.next_due()) == (None, 3)
    assert queue.take(3) == "a"
    queue.done("a")
    queue.add("a")
    assert queue.take(3) == "a"


def test_a_key_that_rests_is_taken_if_there_is_news_or_its_moment_has_come(
    queue: WorkQueue[str],
):
    queue.add("a")
    queue.take(0)
    queue.done("a", rests_until=3)
    assert (queue.take(9), queue.next_due()) == (None, None)
    queue.add("a")  # its rest is long over
    assert queue.take(9) == "a"
    queue.done("a", rests_until=20)
    queue.add_at("a", 12)
    queue.add("a")
    assert queue.take(12) == "a"
    queue.done("a")
    assert queue.take(30) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "later", "take", "done", "rests", "failed"]), st.sampled_from("abc")
        ),
        max_size=60,
    )
)
def test_whatever_happens_no_change_is_lost_and_no_key_is_taken_twice_at_once(steps: list[tuple[str, str]]):
    queue: WorkQueue[str] = WorkQueue(backoff_seconds=1, backoff_limit_seconds=4)
    now, taken, wanted = 0.0, set(), set()
    for step, key in steps:
        now += 1
        if step == "add":
            queue.add(key)
            wanted.add(key)
        elif step == "later":
            queue.add_at(key, now + 5)
            wanted.add(key)
        elif step == "take":
            got = queue.take(now)
            if got is not None:
                assert got not in taken
                taken.add(got)
                wanted.discard(got)
        elif taken:
            back = sorted(taken)[0]
            taken.discard(back)
            if step == "done":
                queue.done(back)
            elif step == "rests":
                queue.done(back, rests_until=now + 3)
            else:
                queue.failed(back, now)
                wanted.add(back)
    for key in taken:
        queue.done(key)
    left = set()
    while (got := queue.take(now + 100)) is not None:
        left.add(got)
    assert left == wanted


def test_news_cuts_a_back_off_short_but_not_a_wait_that_the_cluster_asked_for():
    queue: WorkQueue[str] = WorkQueue(backoff_seconds=1)
    for least, taken in ((0.0, "a"), (5.0, None)):
        queue.add("a")
        assert queue.take(0) == "a"
        queue.add("a")  # while it is worked on
        queue.failed("a", 0, at_least=least)
        queue.add("a")  # and afterwards
        queue.add_at("a", 1)
        assert queue.take(0) == taken
        if taken:
            queue.done("a")
    assert queue.take(4.9) is None
    assert queue.take(5) == "a"
    queue.done("a")
    queue.add("a")
    assert queue.take(5) == "a"
