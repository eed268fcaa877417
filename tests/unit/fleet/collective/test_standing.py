"""Who waits where, and who waits for whom in vain."""

import pytest

from fleet.collective.standing import Standing, Way


def test_a_heartbeat_carries_it():
    standing = Standing().begin("the average of step 0's gradients", Way.EXCHANGE).end()
    standing = standing.begin("a barrier", Way.CALL)
    assert standing == Standing(1, 1, Way.CALL, "a barrier")
    assert Standing.from_text(standing.to_text()) == standing


EXCHANGING = Standing(calls=4, exchanges=3, way=Way.EXCHANGE)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        pytest.param(Standing(5, 2, Way.CALL), True, id="a-call-that-comes-after-fewer-backward-passes"),
        pytest.param(Standing(5, 3, Way.CALL), False, id="it-has-left-the-exchange-already"),
        pytest.param(Standing(4, 2, Way.CALL), False, id="it-still-leaves-a-call-that-has-been"),
        pytest.param(Standing(5, 2, Way.OTHER), False, id="it-computes"),
        pytest.param(Standing(4, 2, Way.EXCHANGE), False, id="it-still-leaves-the-exchange-before"),
    ],
)
def test_who_waits_for_each_other_in_two_places(other, expected):
    assert EXCHANGING.never_meets(other) is expected
    assert other.never_meets(EXCHANGING) is expected
