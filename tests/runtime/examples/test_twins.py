"""Examples with parameter servers beside their twins of one process: as good, and in sync mode equal."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.replicas import Replica, job

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LOSS = 1e-5
"""By how much a loss in sync mode may be another than the twin's."""
GEO = 0.2
"""By how much the test loss in GEO may be another than one process's, which begins at 4.16."""
ASYNC = 0.03
"""By how much the result in async mode may be after a few steps, of which no two runs make the same."""


@dataclass(frozen=True)
class Example:
    """One example, at a size that takes seconds.

    Attributes
    ----------
    name : str
        Of its folder.
    flags : sequence of str
        For both scripts.
    batch_size : int
        Of each trainer.
    steps : int
        How many the twin makes with batches of twice that.
    result : str
        What the last line tells.
    above : float
        What the twin's result is more than.
    """

    name: str
    flags: Sequence[str]
    batch_size: int
    steps: int
    result: str
    above: float = 0.0


EXAMPLES_WITH_TWINS = [
    Example("ctr", ("--generate=6000",), 200, 15, "test AUC", above=0.55),
    Example("deepfm", ("--generate=3000", "--lr=1e-3"), 100, 15, "test AUC"),
    Example("distribute_ctr", ("--generate=6000",), 200, 15, "test AUC"),
    Example("simnet_bow", ("--generate=2600", "--words=20000"), 128, 10, "test accuracy"),
    Example("word2vec", ("--words=2500", "--dimension=20", "--lr=30"), 500, 19, "test loss"),
]
IN_GEO = Example("word2vec", ("--words=2500", "--dimension=20", "--lr=10"), 50, 199, "test loss")
"""Of twice as many steps as lie between two exchanges."""
IN_ASYNC_MODE = [each for each in EXAMPLES_WITH_TWINS if each.name == "deepfm"]
"""Those that are so near to their twin after a few steps; READMEs tell of longer runs of the others."""


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([0-9.]+)", output, re.MULTILINE)]


def result(example: Example, output: str) -> str:
    found = re.findall(rf"^{example.result}: ([0-9.]+)$", output, re.MULTILINE)
    assert len(found) == 1, output
    return str(found[0])


def run(
    example: Example, directory: Path, mode: str, batch_size_of_twin: int
) -> tuple[Replica, list[Replica]]:
    """Train by one process and by a job; return the process and the trainers, which have ended."""
    folder = EXAMPLES / example.name
    with job(directory, servers=2, trainers=2, TMPDIR=str(directory), FLEET_SYNC_MODE=mode) as made:
        batch_size = f"--batch-size={example.batch_size}"
        servers, trainers = made.start(folder / "train.py", *example.flags, batch_size)
        batch_size = f"--batch-size={batch_size_of_twin}"
        twin = made.trainer(2, folder / "single.py", *example.flags, batch_size)
        for replica in (twin, *trainers, *servers):
            replica.expect(0)
    return twin, trainers


@pytest.mark.timeout(240)
@pytest.mark.parametrize("example", EXAMPLES_WITH_TWINS, ids=lambda example: example.name)
def test_in_sync_mode_trainers_lose_together_what_one_process_does(example, tmp_path):
    twin, trainers = run(example, tmp_path, "Sync", 2 * example.batch_size)
    expected = losses(twin.output)
    assert len(expected) == example.steps
    means = [sum(each) / 2 for each in zip(*(losses(each.output) for each in trainers), strict=True)]
    assert means == pytest.approx(expected, abs=LOSS)
    assert [result(example, each.output) for each in trainers] == [result(example, twin.output)] * 2
    assert float(result(example, twin.output)) > example.above


@pytest.mark.timeout(240)
@pytest.mark.parametrize("example", IN_ASYNC_MODE, ids=lambda example: example.name)
def test_in_async_mode_the_trainer_that_ends_last_is_as_good_as_one_process(example, tmp_path):
    twin, trainers = run(example, tmp_path, "Async", example.batch_size)
    last = max(trainers, key=lambda each: each.log.stat().st_mtime)
    expected = float(result(example, twin.output))
    assert float(result(example, last.output)) == pytest.approx(expected, abs=ASYNC)


@pytest.mark.timeout(240)
def test_in_geo_trainers_that_exchange_now_and_then_are_about_as_good_as_one_process(tmp_path):
    twin, trainers = run(IN_GEO, tmp_path, "Geo", IN_GEO.batch_size)
    expected = float(result(IN_GEO, twin.output))
    for trainer in trainers:
        assert len(losses(trainer.output)) == IN_GEO.steps
        assert float(result(IN_GEO, trainer.output)) == pytest.approx(expected, abs=GEO)
