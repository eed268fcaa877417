"""The supervisor alone: it starts processes, tells of their ends, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from fleet_operator.local.log import without_times
from fleet_operator.local.supervisor_client import Exited, Started, SupervisorClient, SupervisorLostError
from tests.support.local import GRANDCHILDREN, MARK, survivors
from tests.support.processes import name_of, parent, wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what is left"),
]


class Supervised:
    """A supervisor with what it reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.reports: asyncio.Queue[Started | Exited] = asyncio.Queue()
        self.lost: asyncio.Queue[SupervisorLostError] = asyncio.Queue()
        self.supervisor = SupervisorClient(self.reports.put_nowait, self.lost.put_nowait)

    def launch(self, *argv: str, identity: str = "one") -> None:
        self.supervisor.launch(
            identity,
            argv=argv,
            env={"PATH": os.environ["PATH"], MARK: self.mark},
            cwd=self.folder,
            log=self.folder / f"{identity}.log",
        )

    async def started(self) -> int:
        report = await asyncio.wait_for(self.reports.get(), 10)
        assert isinstance(report, Started), report
        return report.pid

    async def exited(self) -> Exited:
        while True:
            report = await asyncio.wait_for(self.reports.get(), 10)
            if isinstance(report, Exited):
                return report

    async def spawned(self) -> None:
        for _ in range(500):
            if (self.folder / "spawned").exists():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the script has not spawned its grandchildren")


@pytest.fixture
async def supervised(tmp_path: Path) -> AsyncIterator[Supervised]:
    one = Supervised(tmp_path)
    await one.supervisor.start()
    yield one
    await one.supervisor.close()
    wait_for(lambda: not survivors(one.mark), "the end of every process")


@pytest.mark.parametrize(
    ("source", "code"),
    [
        pytest.param("pass", 0, id="an-end-that-went-well"),
        pytest.param("raise SystemExit(3)", 3, id="an-exit-code"),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, id="a-signal"),
    ],
)
async def test_reports_how_a_process_ended(supervised, source, code):
    supervised.launch(sys.executable, "-c", source)
    await supervised.started()
    assert await supervised.exited() == Exited("one", code)


async def test_appends_what_a_process_prints_to_its_log_with_the_times(supervised):
    log = supervised.folder / "one.log"
    log.write_text("before\n")
    os.mkfifo(supervised.folder / "go")
    began = datetime.now(UTC)
    supervised.launch(
        "sh", "-c", "echo out; echo err >&2; echo; printf 'a\\nb'; read line <go; echo c; printf d"
    )
    wait_for(lambda: log.read_text().endswith("Z b"), "a line that has only begun")
    middle = datetime.now(UTC)
    (supervised.folder / "go").write_text("\n")
    await supervised.exited()
    assert without_times(log.read_text()) == "before\nout\nerr\n\na\nbc\nd"
    stamps = [datetime.fromisoformat(line.split(" ")[0]) for line in log.read_text().splitlines()[1:]]
    assert stamps == sorted(stamps)
    told = timedelta(milliseconds=1)  # how exactly
    assert began - told <= stamps[0] <= stamps[-2] <= middle <= stamps[-1] + told
    assert stamps[-1] <= datetime.now(UTC)


async def test_a_disk_without_room_ends_no_process(supervised):
    (supervised.folder / "one.log").symlink_to("/dev/full")
    supervised.launch(sys.executable, "-c", "print('x' * 1_000_000)")
    assert await supervised.exited() == Exited("one", 0)


async def test_much_output_at_once_is_all_there_when_the_end_is_told(supervised):
    supervised.launch(sys.executable, "-c", "for i in range(100_000): print(i)")
    await supervised.exited()
    said = without_times((supervised.folder / "one.log").read_text())
    assert said == "".join(f"{number}\n" for number in range(100_000))


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        pytest.param(("no-such-program",), "cannot start 'no-such-program'", id="a-missing-program"),
        pytest.param(("/dev/null",), "Permission denied", id="a-file-that-is-no-program"),
        pytest.param(("x" * 70_000,), "File name too long", id="a-name-longer-than-a-line"),
    ],
)
async def test_says_why_a_process_cannot_start(supervised, argv, sentence):
    supervised.launch(*argv)
    report = await supervised.exited()
    assert report.code == 128
    assert sentence in (report.error or "")


async def test_signals_are_not_ignored_in_what_it_starts(supervised):
    supervised.launch("sh", "-c", "cat /proc/self/status")
    await supervised.exited()
    status = (supervised.folder / "one.log").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
        assert not ignored >> (signum - 1) & 1, signum


async def test_a_process_may_end_by_itself_after_sigterm(supervised):
    handler = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7))"
    supervised.launch(sys.executable, "-c", f"{handler}; print(1, flush=True); time.sleep(60)")
    await supervised.started()
    wait_for((supervised.folder / "one.log").read_text, "the handler")
    supervised.supervisor.stop("one", 30)
    assert await supervised.exited() == Exited("one", 7)


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(supervised):
    supervised.launch("sh", "-c", "trap '' TERM; echo set; sleep 60; sleep 60")
    await supervised.started()
    wait_for((supervised.folder / "one.log").read_text, "the trap")
    supervised.supervisor.stop("one", 0.2)
    assert await supervised.exited() == Exited("one", 137)


async def test_the_end_of_the_main_process_ends_its_grandchildren(supervised):
    supervised.launch(sys.executable, "-c", GRANDCHILDREN)
    main = await supervised.started()
    await supervised.spawned()
    assert len(survivors(supervised.mark)) == 5
    os.kill(main, signal.SIGKILL)
    assert await supervised.exited() == Exited("one", 137)
    assert survivors(supervised.mark) == []


async def test_a_killed_keeper_takes_its_pod_with_it_and_no_other(supervised):
    supervised.launch(sys.executable, "-c", GRANDCHILDREN)
    main = await supervised.started()
    await supervised.spawned()
    supervised.launch("sleep", "60", identity="other")
    other = await supervised.started()
    os.kill(parent(main), signal.SIGKILL)
    report = await supervised.exited()
    assert (report.id, report.code) == ("one", 137)
    assert survivors(supervised.mark) == [other]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
async def test_the_end_of_the_supervisor_ends_all_and_is_noticed(supervised, signum):
    supervised.launch(sys.executable, "-c", GRANDCHILDREN)
    main = await supervised.started()
    await supervised.spawned()
    os.kill(parent(parent(main)), signum)
    error = await asyncio.wait_for(supervised.lost.get(), 10)
    assert "supervisor" in str(error)
    await supervised.supervisor.close()
    wait_for(lambda: not survivors(supervised.mark), "the end of every process")


async def test_a_main_process_does_not_outlive_keeper_and_supervisor_that_are_killed_at_once(supervised):
    supervised.launch("sleep", "60")
    main = await supervised.started()
    keeper = parent(main)
    killed = (parent(keeper), keeper)
    pidfd = os.pidfd_open(main)
    try:
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # stopped, neither can act on the other's death
            for pid in killed:
                os.kill(pid, signum)
        assert select.select([pidfd], [], [], 10)[0]
    finally:
        os.close(pidfd)


async def test_a_kill_by_the_name_of_the_command_leaves_the_helpers_to_their_work(supervised):
    supervised.launch("sleep", "60")
    keeper = parent(await supervised.started())
    for pid in (parent(keeper), keeper):
        assert "fleet" not in name_of(pid)


async def test_close_leaves_nothing(supervised):
    for identity in ("one", "two"):
        supervised.launch(sys.executable, "-c", GRANDCHILDREN, identity=identity)
        await supervised.started()
    await supervised.spawned()
    await supervised.supervisor.close()
    assert survivors(supervised.mark) == []


RUNNER = f"""
import asyncio, os, pathlib, sys
from fleet_operator.local.supervisor_client import SupervisorClient
async def main():
    supervisor = SupervisorClient(lambda report: None, lambda error: None)
    await supervisor.start()
    folder = pathlib.Path.cwd()
    for identity in ("one", "two"):
        supervisor.launch(identity, argv=[sys.executable, "-c", {GRANDCHILDREN!r}], env=dict(os.environ),
                     cwd=folder, log=folder / f"{{identity}}.log")
    await asyncio.sleep(300)
asyncio.run(main())
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_death_of_the_runner_leaves_nothing(tmp_path, signum):
    mark = uuid.uuid4().hex
    environ = {**os.environ, MARK: mark}
    command = [sys.executable, "-c", RUNNER]
    runner = subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL)
    try:
        wait_for((tmp_path / "spawned").exists, "the grandchildren")
        wait_for(lambda: len(survivors(mark)) >= 10, "both pods' processes")
        runner.send_signal(signum)
        runner.wait(10)
    finally:
        runner.kill()  # if it still runs; the supervisor ends the rest
        runner.wait(10)
    wait_for(lambda: not survivors(mark), "the end of every process")
