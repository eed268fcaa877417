from __future__ import annotations

import asyncio

import pytest

from fleet_operator.cluster.limit import TokenBucket
from tests.support.clusters import FakeClock


def test_a_burst_goes_at_once_and_the_rest_at_the_rate():
    clock = FakeClock()
    bucket = TokenBucket(10, 3, monotonic=clock.monotonic)
    assert [bucket.reserve() for _ in range(6)] == pytest.approx([0, 0, 0, 0.1, 0.2, 0.3])


def test_a_quiet_time_saves_up_no_more_than_a_burst():
    clock = FakeClock()
    bucket = TokenBucket(10, 2, monotonic=clock.monotonic)
    clock.seconds = 3600
    assert [bucket.reserve() for _ in range(3)] == pytest.approx([0, 0, 0.1])
    clock.seconds += 0.1
    assert bucket.reserve() == pytest.approx(0.1)


async def test_those_who_wait_pass_in_their_order():
    bucket = TokenBucket(200, 1)
    passed: list[int] = []

    async def go(number: int) -> None:
        await bucket.take()
        passed.append(number)

    async with asyncio.timeout(5):
        await asyncio.gather(*(go(number) for number in range(5)))
    assert passed == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (1, 0)])
def test_a_bucket_that_lets_nothing_through_is_refused(rate: float, burst: int):
    with pytest.raises(ValueError, match="expected a positive rate and burst"):
        TokenBucket(rate, burst)
