"""Weights that are no numbers: whose last words tell of them, and what the job says then."""

import pytest

from fleet_operator.plan.model import ObservedPod
from fleet_operator.plan.non_finite import trainers_with_non_finite
from tests.support.plans import Story, ended, pserver, trainer

LOST = '{"step": 9, "counters": {"non_finite_parameters": 2}}'
WELL = '{"step": 9, "counters": {}}'


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param([ended(trainer(2), message=LOST), ended(trainer(0), message=LOST)], [0, 2], id="each"),
        pytest.param([ended(trainer(0), message=WELL)], [], id="not-one-that-counts-none"),
        pytest.param([ended(trainer(0))], [], id="not-one-that-says-nothing"),
        pytest.param([ended(trainer(0), message="Killed")], [], id="not-one-with-other-words"),
        pytest.param([ended(trainer(0), 1, message=LOST)], [], id="not-one-that-has-failed"),
        pytest.param([trainer(0, message=LOST)], [], id="not-one-that-still-runs"),
        pytest.param([ended(pserver(0), message=LOST)], [], id="not-a-parameter-server"),
    ],
)
def test_trainers_with_non_finite(pods: list[ObservedPod], expected):
    assert trainers_with_non_finite(pods) == expected


def test_weights_that_are_no_numbers_are_no_success_without_a_word():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    story.sees(pserver(0), pserver(1), ended(trainer(0), message=WELL), ended(trainer(1), message=LOST))
    told = story.job.status.condition("Succeeded")
    assert told is not None
    assert (
        told.message
        == "all 2 trainers have completed; but trainer 1 ended with NaN or infinity in the weights"
    )
