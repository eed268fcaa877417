"""What plans are made of."""

import pytest

from fleet_operator.plan.model import Attempt


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        pytest.param("2.7", Attempt(2, 7), id="what-was-written"),
        pytest.param("", Attempt(), id="no-label-is-the-oldest"),
        pytest.param("2", Attempt(), id="half-a-label-is-the-oldest"),
        pytest.param("a.b", Attempt(), id="nonsense-is-the-oldest"),
    ],
)
def test_attempt_reads_its_label(label, expected):
    assert Attempt.parse(label) == expected


def test_attempts_are_ordered_by_the_job_first():
    assert sorted([Attempt(1, 0), Attempt(0, 9), Attempt(0, 1)]) == [
        Attempt(0, 1),
        Attempt(0, 9),
        Attempt(1, 0),
    ]
    assert Attempt.parse(str(Attempt(3, 4))) == Attempt(3, 4)
