"""Reporters get what a script reports, and never stop its training."""

import logging
import os
import subprocess
import sys
import textwrap
import threading
import tomllib
from collections.abc import Mapping

import pytest

from fleet.errors import EXIT_CONFIGURATION, ConfigurationError
from fleet.process import reporting
from fleet.process.reporting import Reported, Reporter, Reporting
from tests.support.documents import block

REPORTED = Reported("digits", "trainer-0", 0, {})
SECONDS = 20


class Recorder:
    """A reporter that keeps what it gets, after `gate` is open."""

    def __init__(self, gate: threading.Event | None = None, fails_at: int | None = None) -> None:
        self.got: list[tuple[int, Mapping[str, float]]] = []
        self.closed = 0
        self._gate, self._fails_at = gate, fails_at

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._gate is not None:
            assert self._gate.wait(SECONDS)
        if step == self._fails_at:
            raise OSError("the disk is full")
        self.got.append((step, values))

    def close(self) -> None:
        self.closed += 1


def ended(reporting: Reporting, seconds: float = SECONDS) -> None:
    reporting.end()
    reporting.join(seconds)


def test_a_reporter_gets_every_report_in_order_and_is_closed():
    recorder = Recorder()
    reporting = Reporting("mine", lambda _: recorder, REPORTED)
    for step in range(5):
        reporting.log({"loss": 1.0 / (step + 1)}, step)
    ended(reporting)
    assert recorder.got == [(step, {"loss": 1.0 / (step + 1)}) for step in range(5)]
    assert recorder.closed == 1


def test_a_reporter_that_fails_is_named_once_and_closed(caplog):
    broken = Recorder(fails_at=1)
    reporting = Reporting("broken", lambda _: broken, REPORTED)
    for step in range(4):
        reporting.log({"loss": 0.5}, step)
    ended(reporting)
    reporting.log({"loss": 0.5}, 5)  # for nobody
    assert ([step for step, _ in broken.got], broken.closed) == ([0], 1)
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert warning == (
        "the reporter broken failed at step 1 and gets no further values: OSError: the disk is full"
    )


def test_a_reporter_that_cannot_start_is_named(caplog):
    def unreachable(_: Reported) -> Reporter:
        raise ConnectionError("no server at 127.0.0.1")

    reporting = Reporting("down", unreachable, REPORTED)
    reporting.log({"loss": 0.5}, 7)
    ended(reporting)
    assert "the reporter down cannot start" in caplog.text
    assert "no server at 127.0.0.1" in caplog.text


def test_a_slow_reporter_never_delays_a_report_and_the_dropped_ones_are_counted(caplog):
    gate = threading.Event()
    slow = Recorder(gate)
    reporting = Reporting("slow", lambda _: slow, REPORTED, capacity=3)
    for step in range(10):
        reporting.log({"loss": 0.5}, step)  # would block for ever
    gate.set()
    ended(reporting)
    steps = [step for step, _ in slow.got]
    assert steps[-3:] == [7, 8, 9]
    assert f"{10 - len(steps)} reports to slow were dropped" in caplog.text


def test_a_reporter_that_does_not_end_is_left_after_the_time_limit(caplog):
    gate = threading.Event()
    reporting = Reporting("stuck", lambda _: Recorder(gate), REPORTED)
    reporting.log({"loss": 0.5}, 1)
    ended(reporting, 0.05)
    gate.set()
    assert "the reporter stuck has not ended in time" in caplog.text


def test_a_name_that_no_package_has_installed_is_refused_at_once():
    with pytest.raises(ConfigurationError, match=r"names 'tensorbord'.*mlflow, tensorboard, wandb"):
        reporting.check({"FLEET_REPORTERS": "tensorbord"})
    reporting.check({"FLEET_REPORTERS": " tensorboard , mlflow"})
    reporting.check({})


def test_a_wrong_name_ends_a_replica_as_a_mistake_that_no_restart_mends(tmp_path):
    start = "from fleet.process import lifecycle\nlifecycle.start(None)\n"
    ended = run(start, tmp_path, FLEET_REPORTERS="tensorbord", PADDLE_TRAINER_ID="2")
    assert ended.returncode == EXIT_CONFIGURATION
    assert ended.stderr.startswith("trainer 2: FLEET_REPORTERS names 'tensorbord'")


SCRIPT = """
import fleet
fleet.report({"accuracy": 0.5}, step=3, loss=0.25)
fleet.report(step=4)  # has no values
"""


def run(source: str, folder: os.PathLike[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=folder,
        env={**os.environ, "FLEET_TERMINATION_LOG": os.devnull, "PYTHONPATH": str(folder), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def plug_in(folder, body: str) -> None:
    """Install a package with a reporter named `mine` in a folder."""
    (folder / "mine.py").write_text(textwrap.dedent(body))
    about = folder / "mine-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[fleet.reporters]\nmine = mine:Mine\n")


MINE = """
class Mine:
    def __init__(self, reported):
        self._begin = f"{reported.job} {reported.replica} {reported.restarts}"
    def log(self, values, step):
        print(self._begin, step, values, flush=True)
    def close(self):
        print("closed", flush=True)
"""


def test_a_package_adds_a_reporter_by_its_entry_point(tmp_path):
    plug_in(tmp_path, MINE)
    job = {"FLEET_JOB_NAME": "digits", "PADDLE_TRAINER_ID": "2", "FLEET_RESTARTS": "1"}
    ended = run(SCRIPT, tmp_path, FLEET_REPORTERS="mine", **job)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "digits trainer-2 1 3 {'loss': 0.25, 'accuracy': 0.5}",
        "closed",
    ]


def test_the_reporter_of_the_page_is_installed_as_the_page_says(tmp_path):
    (tmp_path / "my_package.py").write_text(block("docs/watching.md", "Your own reporter"))
    about = tmp_path / "my_package-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1\n")
    table = tomllib.loads(block("docs/watching.md", "Your own reporter", "toml"))["project"]["entry-points"]
    ((group, names),) = table.items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    job = {"FLEET_JOB_NAME": "digits", "PADDLE_TRAINER_ID": "0"}
    ended = run(SCRIPT, tmp_path, FLEET_REPORTERS="printer", **job)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "digits trainer-0 3 {'loss': 0.25, 'accuracy': 0.5}",
        "digits trainer-0 ended",
    ]


def test_without_its_package_a_reporter_is_refused_with_what_to_install(tmp_path):
    plug_in(tmp_path, MINE + "    package = 'a_tool_that_is_missing'\n")
    ended = run(SCRIPT, tmp_path, FLEET_REPORTERS="mine")
    assert ended.returncode == 2
    assert "pip install a_tool_that_is_missing" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_failed_script_leaves_its_last_values(tmp_path):
    plug_in(tmp_path, MINE)
    ended = run(SCRIPT + "raise ValueError('of the script')\n", tmp_path, FLEET_REPORTERS="mine")
    assert ended.returncode == 1
    assert "'loss': 0.25" in ended.stdout
    assert "closed" in ended.stdout


def test_a_reporter_that_starts_as_the_script_ends_gets_its_values(tmp_path):
    late = """
        import threading
        threading.main_thread().join(60)
        import concurrent.futures.thread  # as the packages of all tools do
    """
    begin = "def __init__(self, reported):"
    plug_in(tmp_path, MINE.replace(begin, begin + late.rstrip(" ")))
    ended = run(SCRIPT, tmp_path, FLEET_REPORTERS="mine", FLEET_JOB_NAME="digits", PADDLE_TRAINER_ID="0")
    assert ended.stdout.splitlines() == [
        "digits trainer-0 0 3 {'loss': 0.25, 'accuracy': 0.5}",
        "closed",
    ], ended.stderr


def test_a_forked_child_leaves_the_reporters_to_its_parent(tmp_path):
    plug_in(tmp_path, MINE)
    script = """
    import os, fleet
    fleet.report(step=1, loss=1.0)
    if (child := os.fork()) == 0:
        fleet.report(step=2, loss=2.0)
        os._exit(0)
    os.waitpid(child, 0)
    fleet.report(step=3, loss=3.0)
    """
    ended = run(script, tmp_path, FLEET_REPORTERS="mine")
    assert ended.returncode == 0, ended.stderr
    assert [line.split(" ", 3)[2] for line in ended.stdout.splitlines()[:-1]] == ["0", "0"]
    assert "2.0" not in ended.stdout
