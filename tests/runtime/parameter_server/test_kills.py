"""A few kills at random, by a fixed seed; ``python -m benchmarks.kills`` makes 200 for each optimizer.

Adam, which has the most state; test_rejoin.py kills at the worst moment, with momentum too.
"""

from pathlib import Path

import pytest

from benchmarks.kills import STEPS_PER_KILL, train

KILLS = 4
STEPS = STEPS_PER_KILL * (KILLS + 1)

pytestmark = pytest.mark.timeout(600)


def test_a_training_of_which_replicas_are_killed_ends_with_the_bits_of_one_left_alone(tmp_path: Path) -> None:
    outcomes = []
    for name, kills_at in (("alone", ()), ("killed", (2, 9, 17, 26))):
        folder = tmp_path / name
        folder.mkdir()
        outcomes.append(train(folder, "adam", STEPS, kills_at, seed=4))
    alone, killed = outcomes
    assert alone.killed.total() == 0
    assert killed.killed.total() == KILLS
    assert set(killed.killed) == {"server", "trainer"}
    assert killed.digests == alone.digests
    assert len(alone.digests) == 1
