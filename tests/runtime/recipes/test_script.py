"""The script of the page about one's own, and its pieces, each role in a thread of this process."""

from __future__ import annotations

import re
import runpy
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fleet import parameter_server
from fleet.process import lifecycle
from fleet.role_maker import Role, UserDefinedRoleMaker
from tests.support.local import LocalRun, forked
from tests.support.processes import free_ports
from tests.support.recipes import recipes, written
from tests.support.threads import at_once, one_torch_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 250  # torch takes seconds to start and minutes on a crowded machine
UNTRAINED = 8.0  # what a model that answers 0 loses
DOCKERFILE = Path(__file__).parents[3] / "Dockerfile"
PLACES = {
    "model": r"    model = .*\n",
    "optimizer": r"    optimizer = .*\n",
    "loop": r"    for _, batches(.*\n)*?(?=    fleet.stop_worker)",
    "end": r"(?<=\n)(?=\n\nif __name__)",
}
"""What of the script a piece stands instead of."""


def script(recipe: str) -> str:
    """Return the script with the pieces of a recipe in it, as a reader puts them there."""
    blocks = recipes()
    text = blocks["script.py"]
    pieces = {name.partition("/")[2]: code for name, code in blocks.items() if name.startswith(f"{recipe}/")}
    assert pieces
    for place, code in pieces.items():
        [found] = re.finditer(PLACES[place], text)
        text = text[: found.start()] + textwrap.indent(code, "    ") + text[found.end() :]
    return text


@pytest.fixture(autouse=True)
def _alone_in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lifecycle, "start", lambda _: None)
    with one_torch_thread():
        yield


@pytest.mark.timeout(SECONDS + 50)
@pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what a run leaves")
def test_the_script_trains_by_its_manifest(tmp_path: Path):
    folder = tmp_path / "run"
    written(folder, "script.py")
    with LocalRun(folder, forked(yaml.safe_load(recipes()["script.yaml"]))) as run:
        assert run.wait(SECONDS) == 0, run.stderr
        said = [run.log(f"trainer-{index}") for index in (0, 1)]
    assert all(float(re.findall(r"loss: ([\d.]+)", each)[-1]) < 0.001 for each in said)


def test_the_image_of_the_script_runs_as_the_trainers_and_has_the_script_where_its_pods_start():
    trainers = DOCKERFILE.read_text().rpartition("\nFROM ")[2]
    told = dict(line.split(maxsplit=1) for line in recipes()["Dockerfile"].splitlines())  # the last of each
    [workdir] = re.findall(r"^WORKDIR (.+)$", trainers, re.MULTILINE)
    assert told["USER"] == re.findall(r"^USER (.+)$", trainers, re.MULTILINE)[-1]
    assert told["COPY"] == f"script.py {workdir}/"
    container = yaml.safe_load(recipes()["script.yaml"])["spec"]["template"]["spec"]["containers"][0]
    assert (container["image"], container["command"]) == (told["FROM"], ["python", "script.py"])


@pytest.mark.parametrize(
    ("recipe", "below"),
    [
        ("clipping", 0.1),
        ("mean-clipping", 0.1),
        ("accumulation", 0.1),
        ("scaler", 0.1),
        ("scheduler", 0.1),
        ("metrics", 0.001),
        ("snapshot", 0.001),
        ("networks", 0.9 * UNTRAINED),
        ("writing", 0.5 * UNTRAINED),
        ("max-norm", UNTRAINED),
        ("geo", 0.1),
    ],
)
def test_a_recipe_trains(
    recipe: str,
    below: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "script.py"
    copy.write_text(script(recipe))
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(1)]
    seeding = threading.Lock()  # threads share torch's random numbers; each model is made of its own seed

    def main(role: Any, index: int) -> Any:
        maker = UserDefinedRoleMaker(index, role, 2, endpoints)

        class Placed(parameter_server.Fleet):
            def init(self, role_maker: Any = maker) -> None:
                super().init(role_maker)
                seeding.acquire()

            def distributed_optimizer(self, *arguments: Any, **options: Any) -> Any:
                seeding.release()
                return super().distributed_optimizer(*arguments, **options)

        monkeypatch.setattr(parameter_server, "fleet", Placed())
        return runpy.run_path(str(copy))["main"]

    at_once(main(Role.SERVER, 0), main(Role.WORKER, 0), main(Role.WORKER, 1), seconds=100)
    losses = [float(loss) for loss in re.findall(r"^loss: ([\d.]+)", capsys.readouterr().out, re.MULTILINE)]
    assert len(losses) == 2
    assert max(losses) < below
    assert recipe != "metrics" or losses[0] == losses[1]  # that of both trainers' samples
    assert (tmp_path / "model.pt").exists() == (recipe == "snapshot")
