"""Collective examples beside their twins of one process: two trainers make the twin's steps."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.collective import ForkedTrainer, environments
from tests.support.example_data import write_pictures, write_text
from tests.support.processes import free_ports

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
BATCH, STEPS = 4, 12
LOSS = 1e-5
"""By how much the trainers' mean loss may be another than the twin's."""
VARIANT = 0.3
"""By how much it may be where gradients are rounded, or parameters are averaged in place of them."""
SMALL = ("--epochs=3", "--print-every=1")


@dataclass(frozen=True)
class Example:
    """One example, at a size that takes seconds: 32 samples to train on.

    Attributes
    ----------
    name : str
        Of its folder.
    flags : sequence of str
        For both scripts.
    variant : str
        A flag for another run of the trainers; its line is the same in all examples.
    results : sequence of str
        What the last lines tell.
    write_data : callable
        Writes what it trains on, and returns the arguments that name it.
    near : float
        By how much the results may be others than the twin's; each trainer has the same.
    """

    name: str
    flags: Sequence[str]
    variant: str
    results: Sequence[str]
    write_data: Callable[[Path], list[str]]
    near: float = LOSS


def write_nothing(path: Path) -> list[str]:
    """Leave it to the example, which generates sentences."""
    return []


RESNET = Example(
    "resnet50",
    ("--layers", "1", "1", "1", "1", "--width=8", "--size=64", "--lr=0.02", "--warm-up=1", "--num-workers=0"),
    "--bf16",
    ["test accuracy"],
    write_pictures,
    near=0.25,  # two of eight pictures: the statistics of batches are trainer 0's, and in the twin all parts'
)
TRANSFORMER = Example(
    "transformer",
    ("--generate=42", "--test=10", "--layers=1", "--width=16", "--heads=2", "--dropout=0", "--warm-up=8"),
    "--local-sgd=4",
    ["test accuracy"],
    write_nothing,
)
BERT = Example(
    "bert",
    ("--length=19", "--layers=1", "--width=16", "--heads=2", "--dropout=0", "--lr=1e-3"),
    "--bf16",
    ["test loss", "hidden words found", "what follows is told"],
    write_text,
)


@dataclass(frozen=True)
class Outputs:
    """What the processes of one example have written."""

    example: Example
    twin: str
    trainers: list[str]
    variants: list[str]


def start(script: Path, directory: Path, *flags: str, **environ: str) -> tuple[ForkedTrainer, Path]:
    log = directory / f"{len(list(directory.glob('*.log')))}.log"
    with log.open("wb") as output:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLEET_"))
        }
        process = ForkedTrainer(script, *flags, env=inherited | environ, output=output, errors=output)
    return process, log


@pytest.fixture(scope="module", params=[RESNET, TRANSFORMER, BERT], ids=lambda example: example.name)
def outputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    example, directory = request.param, tmp_path_factory.mktemp(request.param.name)
    folder = EXAMPLES / example.name
    flags = [*SMALL, *example.flags, *example.write_data(directory / "data")]
    started = [start(folder / "single.py", directory, *flags, f"--batch-size={2 * BATCH}", "--parts=2")]
    ports = free_ports(4)
    for mine, more in ((ports[:2], []), (ports[2:], [example.variant])):
        for environ in environments(directory, mine):
            everything = (*flags, f"--batch-size={BATCH}", *more)
            started.append(start(folder / "train.py", directory, *everything, **environ))
    try:
        for process, log in started:
            assert process.wait(100) == 0, log.read_text()
        twin, first, second, *variants = (log.read_text() for _, log in started)
    finally:
        for process, _ in started:
            process.kill()
            process.wait()
    return Outputs(example, twin, [first, second], variants)


def losses(output: str) -> list[float]:
    found = re.findall(rf"^step (\d+) of {STEPS}: loss ([0-9.]+)$", output, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(1, STEPS + 1))
    return [float(loss) for _, loss in found]


def means(trainers: list[str]) -> list[float]:
    return [(one + other) / 2 for one, other in zip(*map(losses, trainers), strict=True)]


def results(example: Example, output: str) -> list[float]:
    found = [re.findall(rf"^{each}: ([0-9.]+)$", output, re.MULTILINE) for each in example.results]
    return [float(each) for (each,) in found]


def test_two_trainers_lose_together_what_one_process_does(outputs: Outputs) -> None:
    assert means(outputs.trainers) == pytest.approx(losses(outputs.twin), abs=LOSS)


def test_the_twin_learns(outputs: Outputs) -> None:
    found = losses(outputs.twin)
    assert sum(found[-4:]) < sum(found[:4])


def test_the_trained_models_are_as_good_as_the_twins(outputs: Outputs) -> None:
    first, second = (results(outputs.example, each) for each in outputs.trainers)
    assert first == second
    assert first == pytest.approx(results(outputs.example, outputs.twin), abs=outputs.example.near)


def test_a_variant_is_another_training_of_the_same(outputs: Outputs) -> None:
    plain, other = means(outputs.trainers), means(outputs.variants)
    assert plain[0] == other[0]
    assert plain[1:] != other[1:]
    assert other == pytest.approx(plain, abs=VARIANT)
    first, second = (results(outputs.example, each) for each in outputs.variants)
    assert first == second
