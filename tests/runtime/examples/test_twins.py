"""Examples of tables beside their twins of one process: as good, and in sync mode equal."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.replicas import job

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LOSS = 1e-5
"""By how much a loss in sync mode may be another than the twin's."""


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
    """

    name: str
    flags: Sequence[str]
    batch_size: int
    steps: int
    result: str


SYNC = [
    Example("deepfm", ("--generate=3000", "--lr=1e-3"), 100, 15, "test AUC"),
    Example("simnet_bow", ("--generate=2600", "--words=20000"), 128, 10, "test accuracy"),
]


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([0-9.]+)", output, re.MULTILINE)]


def result(example: Example, output: str) -> str:
    found = re.findall(rf"^{example.result}: ([0-9.]+)$", output, re.MULTILINE)
    assert len(found) == 1, output
    return str(found[0])


def run(example: Example, directory: Path, flags: Sequence[str], mode: str) -> tuple[str, list[str]]:
    """Train by one process with the batches of two trainers at once, and by a job; return what they say."""
    folder = EXAMPLES / example.name
    with job(directory, servers=2, trainers=2, TMPDIR=str(directory), FLEET_SYNC_MODE=mode) as made:
        servers, trainers = made.start(folder / "train.py", *flags, f"--batch-size={example.batch_size}")
        twin = made.trainer(2, folder / "single.py", *flags, f"--batch-size={2 * example.batch_size}")
        for replica in (twin, *trainers, *servers):
            replica.expect(0)
    return twin.output, [trainer.output for trainer in trainers]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("example", SYNC, ids=lambda example: example.name)
def test_in_sync_mode_trainers_lose_together_what_one_process_does(example, tmp_path):
    twin, trainers = run(example, tmp_path, example.flags, "Sync")
    expected = losses(twin)
    assert len(expected) == example.steps
    means = [sum(each) / len(each) for each in zip(*map(losses, trainers), strict=True)]
    assert means == pytest.approx(expected, abs=LOSS)
    assert [result(example, output) for output in trainers] == [result(example, twin)] * 2
