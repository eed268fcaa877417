"""Success policy: which trainers must have succeeded."""

import pytest

from fleet_operator.api import SuccessPolicy
from fleet_operator.plan.success import is_satisfied, success_sentence
from tests.support.plans import Story, ended, pserver, trainer


@pytest.mark.parametrize(
    ("policy", "succeeded", "expected"),
    [
        pytest.param(SuccessPolicy.ALL, {0, 1}, False, id="all-waits-for-the-last-trainer"),
        pytest.param(SuccessPolicy.ALL, {0, 1, 2}, True, id="all-is-all"),
        pytest.param(SuccessPolicy.ANY, set(), False, id="any-needs-one"),
        pytest.param(SuccessPolicy.ANY, {2}, True, id="any-takes-whichever-is-first"),
        pytest.param(SuccessPolicy.RANK_ZERO, {1, 2}, False, id="rank-zero-ignores-the-others"),
        pytest.param(SuccessPolicy.RANK_ZERO, {0}, True, id="rank-zero-waits-for-nobody"),
    ],
)
def test_is_satisfied(policy, succeeded, expected):
    assert is_satisfied(policy, replicas=3, succeeded=succeeded) is expected


@pytest.mark.parametrize(
    ("policy", "replicas", "expected"),
    [
        pytest.param(SuccessPolicy.ALL, 3, "all 3 trainers have completed", id="all"),
        pytest.param(SuccessPolicy.ALL, 1, "the trainer has completed", id="one"),
        pytest.param(SuccessPolicy.ANY, 3, "trainer 1 has completed, as successPolicy Any asks", id="any"),
        pytest.param(
            SuccessPolicy.RANK_ZERO,
            3,
            "trainer 0 has completed, as successPolicy RankZero asks",
            id="rank-zero",
        ),
    ],
)
def test_success_sentence(policy, replicas, expected):
    assert success_sentence(policy, replicas=replicas, succeeded={1, 2}) == expected


def test_parameter_servers_have_no_vote():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    story.sees(ended(pserver(0), 1), ended(pserver(1)), ended(trainer(0)), ended(trainer(1)))
    assert story.job.status.state == "Succeeded"


def test_enough_success_outweighs_a_failure_of_the_same_moment():
    story = Story(successPolicy="RankZero", failurePolicy={"action": "FailJob"})
    story.sees(pserver(0), pserver(1), ended(trainer(0)), ended(trainer(1), 1))
    assert story.job.status.state == "Succeeded"
