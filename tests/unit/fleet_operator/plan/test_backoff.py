"""Back-off: how long a restart waits."""

import pytest

from fleet_operator.plan.backoff import backoff
from tests.support.plans import Story, ended, pserver, trainer


@pytest.mark.parametrize(
    ("restarts", "seconds"),
    [(1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (100_000, 60)],
    ids=lambda value: f"{value}",
)
def test_backoff_doubles_up_to_a_minute(restarts, seconds):
    assert backoff(restarts).total_seconds() == seconds


def test_each_restart_of_a_replica_waits_longer():
    story, others = Story(), (pserver(0), pserver(1), trainer(0))
    for restart, pause in enumerate((1, 2, 4, 8)):
        moment = 100 * restart
        story.sees(*others, ended(trainer(1, f"0.{restart}"), 1), after=moment)
        assert story.sees(*others, after=moment)[-1] == f"look again after {pause} s"
        assert f"create digits-trainer-1 0.{restart + 1}" in story.sees(*others, after=moment + pause)
