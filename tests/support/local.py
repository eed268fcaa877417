"""Helpers for tests of local runs: small jobs, runs in real processes, and checks for survivors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from fleet_operator.local.log import without_times
from tests.support.forked_python import ForkedPython, program_of, relay
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fleet_operator.cli.view import JobView

MARK = "LOCAL_RUN_MARK"

# A parameter server without torch, which listens and ends once the run's folder contains `done`.
SERVER = """
import os, pathlib, socket, time
host, port = os.environ["PADDLE_CURRENT_IP"], int(os.environ["PADDLE_PORT"])
listener = socket.create_server((host, port))
print("listening", flush=True)
while not pathlib.Path("done").exists():
    time.sleep(0.02)
"""

# Only the last trainer lets the servers end, because a server that ends before all trainers run has failed.
DONE = (
    "import os, pathlib; pathlib.Path('done-' + os.environ['PADDLE_TRAINER_ID']).touch();"
    "len(list(pathlib.Path().glob('done-*'))) == int(os.environ['PADDLE_TRAINERS_NUM'])"
    " and pathlib.Path('done').touch()"
)

# A main process whose descendants try to escape: a child, a double fork in a new session, and a grandchild
# that ignores SIGTERM.
GRANDCHILDREN = """
import os, pathlib, signal, time
def nap():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(300)
if os.fork() == 0:
    nap()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        nap()
    os._exit(0)
if os.fork() == 0:
    if os.fork() == 0:
        nap()
    nap()
time.sleep(0.2)
pathlib.Path("spawned").touch()
time.sleep(300)
"""


class ForkedFleetjob(ForkedPython):
    """``fleetjob``, forked because its imports take longer than most runs of tiny scripts."""

    preloaded = tuple(f"fleet_operator.cli.{part}" for part in ("display", "local_job", "page", "run"))


class Lines:
    """A display that stores the lines that it is given."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    @contextlib.contextmanager
    def showing(self, view: JobView) -> Iterator[None]:
        yield

    def refresh(self) -> None:
        """Do nothing, because there is nothing to redraw."""


def survivors(mark: str) -> list[int]:
    """Return the ids of running processes that have `mark` in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            marked = wanted in (entry / "environ").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marked and state not in "ZX":
            found.append(int(entry.name))
    return found


def job_manifest(
    trainer: str,
    *,
    server: str | None = SERVER,
    trainers: int = 1,
    servers: int = 1,
    name: str = "tiny",
    env: list[dict[str, Any]] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """Return a job whose replicas run the given Python code; without `server`, it is collective."""

    def template(source: str) -> dict[str, Any]:
        command = ["python", "-c", source]
        container = {"name": "fleet", "image": "none", "command": command, "env": env or []}
        return {"spec": {"containers": [container], "terminationGracePeriodSeconds": 2}}

    roles: dict[str, Any] = {"trainer": {"replicas": trainers, "template": template(trainer)}}
    if server is not None:
        roles["pserver"] = {"replicas": servers, "template": template(server)}
    mode = "Collective" if server is None else "ParameterServer"
    return {
        "apiVersion": "fleetjob.dev/v1alpha1",
        "kind": "FleetJob",
        "metadata": {"name": name},
        "spec": {"mode": mode, **roles, **spec},
    }


def forked(job: dict[str, Any], kind: type[ForkedPython] = ForkedPython) -> dict[str, Any]:
    """Return a job whose Python programs are forked from a process that has imported torch.

    Use this to test what a job does, not how its processes start and end.
    """
    environ = relay(kind)
    spec = job["spec"]
    for part in (spec, spec.get("pserver", {}), spec["trainer"]):
        for container in part.get("template", {"spec": {"containers": []}})["spec"]["containers"]:
            container["env"] = [
                *(container.get("env") or []),
                *({"name": name, "value": value} for name, value in environ.items()),
            ]
            program, *arguments = container["command"]
            if program == "python":  # otherwise a local run would use its own interpreter
                container["command"] = [shutil.which(program, path=environ["PATH"]), *arguments]
    return job


@dataclass
class LocalRun:
    """A run of ``fleetjob run`` as a separate process in its own folder."""

    folder: Path
    manifest: Mapping[str, Any] | Path
    options: tuple[str, ...] = (
        "-o",
        "json",
    )
    environ: Mapping[str, str] = field(default_factory=dict)
    python: Path = Path(sys.executable)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "pyproject.toml").touch()  # marks the folder as the working directory
        if isinstance(self.manifest, Path):
            self.path = self.manifest
        else:
            self.path = self.folder / "job.yaml"
            self.path.write_text(yaml.safe_dump(dict(self.manifest)))
        self.logs = self.folder / "logs"
        self.arguments = ["-f", str(self.path), "--log-dir", str(self.logs), *self.options]
        if "--timeout" not in self.options:  # ends the run even if the tests are killed
            self.arguments += ["--timeout", "600"]

    def __enter__(self) -> Self:
        command = ("-m", "fleet_operator", "run", *self.arguments)
        env = {**os.environ, **self.environ, MARK: self.mark}
        self.process: ForkedPython | subprocess.Popen[bytes]
        with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as err:
            if self.python == Path(sys.executable):
                self.process = ForkedFleetjob(*command, env=env, output=out, errors=err, cwd=self.folder)
            else:
                self.process = subprocess.Popen(
                    [self.python, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    cwd=self.folder,
                    env=env,
                    start_new_session=True,
                )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        wait_for(lambda: not survivors(self.mark), "the end of every process of the run")

    @property
    def stderr(self) -> str:
        """The standard error of the run so far."""
        return (self.folder / "stderr").read_text()

    @property
    def stdout(self) -> str:
        """The standard output of the run so far."""
        return (self.folder / "stdout").read_text()

    def wait(self, seconds: float = 100) -> int:
        """Wait for the end of the run and return its exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run has not ended within {seconds} s:\n{self.stderr}") from None

    def result(self) -> dict[str, Any]:
        """Return the JSON object that the run has printed."""
        document: dict[str, Any] = json.loads(self.stdout)
        return document

    def says(self, text: str, seconds: float = 60) -> str:
        """Wait for a line that contains `text`, and return the line."""

        def line() -> str | None:
            return next((line for line in self.stderr.splitlines() if text in line), None)

        deadline = time.monotonic() + seconds
        while (found := line()) is None:
            assert time.monotonic() < deadline, f"never said {text!r} within {seconds} s:\n{self.stderr}"
            assert self.process.poll() is None or line(), f"ended without saying {text!r}:\n{self.stderr}"
            time.sleep(0.02)
        return found

    def pid(self, replica: str, seconds: float = 60) -> int:
        """Wait until a replica has started; return the id of its current process."""
        self.says(f"{replica} has started", seconds)
        lines = [line for line in self.stderr.splitlines() if f"{replica} has started" in line]
        return int(lines[-1].partition("process ")[2].partition(",")[0])

    def kill(self, replica: str, signum: int = signal.SIGKILL) -> None:
        """Send a signal to the main process of a replica."""
        os.kill(program_of(self.pid(replica)), signum)

    def log(self, replica: str) -> str:
        """Return the output of a replica, without the headers between its lives."""
        return without_times((self.logs / f"{replica}.log").read_text())
