"""What the container of `make newcomer` is given, and that it goes; a stand-in for docker notes both."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.programs

RUN = Path("tools/newcomer/run.sh").resolve()

DOCKER = """#!/bin/bash
cd "$(dirname "$0")"
echo "$1 ${@: -1}" >>calls
if [ "$1" = rm ] && [ -e pid ]; then kill "$(cat pid)"; fi
[ "$1" = run ] || exit 0
printf '%s\\n' "$@" >arguments
for each; do
  case $each in *:/handed-in:ro) given=${each%%:*} ;; esac
done
git -C "$given/checkout" rev-parse HEAD >commit
cp "$given/ca.crt" certificates
echo $$ >pid
exec sleep "${SLEEPS-0}"
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A way to start the script in a process group of its own, with a home for its temporary files."""
    docker = tmp_path / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    (tmp_path / "temporary").mkdir()
    started: list[subprocess.Popen[str]] = []

    def run(*verbs: str, **environ: str) -> subprocess.Popen[str]:
        given = {
            "DOCKER": str(docker),
            "BASE_IMAGE": "base:1",
            "TMPDIR": str(tmp_path / "temporary"),
            **environ,
        }
        process = subprocess.Popen(
            [RUN, *verbs],
            env={**os.environ, **given},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_it_is_given_the_commit_and_the_settings_of_this_machine(tmp_path: Path, start: Start):
    (tmp_path / "own.crt").write_text("a certificate")
    process = start("setup", "demo", CA_BUNDLE=str(tmp_path / "own.crt"))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert (tmp_path / "commit").read_text() == head
    assert (tmp_path / "certificates").read_text() == "a certificate"
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert {"--rm", "--env=HTTPS_PROXY", "--env=PIP_INDEX_URL", "--env=UV_DEFAULT_INDEX"} <= set(arguments)
    assert arguments[-3:] == ["make", "setup", "demo"]
    assert "newcomer: make setup demo passed after" in said


def test_a_verb_that_fails_is_its_status(start: Start):
    process = start("test", SLEEPS="no-time")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "newcomer: make test FAILED, exit status 1" in said


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_removes_the_container_and_what_it_was_given(
    tmp_path: Path, start: Start, number: signal.Signals, status: int
):
    process = start("test", SLEEPS="600")
    wait_for((tmp_path / "pid").exists, "the container")
    os.killpg(process.pid, number)
    assert process.wait(60) == status
    name = f"fleet-newcomer-{process.pid}"
    assert name in (tmp_path / "arguments").read_text().splitlines()
    assert (tmp_path / "calls").read_text().splitlines()[-1] == f"rm {name}"
    assert list((tmp_path / "temporary").iterdir()) == []
