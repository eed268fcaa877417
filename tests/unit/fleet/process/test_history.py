"""What is kept of a long run of reports."""

from itertools import pairwise

import pytest

from fleet.process.history import MAX_HISTORY
from fleet.process.progress import Progress


def test_the_rate_follows_the_last_ten_seconds():
    clock = [0.0]
    subject = Progress(lambda: clock[0])
    for second in range(31):
        clock[0] = float(second)
        subject.report(samples=100 * second if second <= 20 else 2000 + 10 * (second - 20))
    assert subject.snapshot()["samplesPerSecond"] == pytest.approx(10.0)


@pytest.mark.parametrize("steps", [1, MAX_HISTORY - 1, MAX_HISTORY, 1000, 20_000])
def test_a_long_curve_is_thinned_evenly_and_keeps_both_ends(steps):
    subject = Progress()
    for step in range(steps):
        subject.report(step=step, loss=1.0 / (step + 1))
    history = subject.snapshot()["history"]
    assert len(history) <= MAX_HISTORY
    assert history[0] == [0, 1.0]
    assert history[-1] == [steps - 1, 1.0 / steps]
    gaps = {later[0] - earlier[0] for earlier, later in pairwise(history[:-1])}
    assert len(gaps) <= 1
    assert len(history) >= min(steps, MAX_HISTORY // 2)
