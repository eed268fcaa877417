"""Settings that every test shares."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.processes import let_programs_heed_signals
from tests.support.turns import Scheduler, Turns, arrange, is_serial
from tools.assets import MissingError

if TYPE_CHECKING:
    from collections.abc import Generator

# How long an example takes says how busy the machine is; what it shows is the same. CI draws the same
# examples each time, so that a change is judged by what it changed.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, print_blob=True)
IN_CI = bool(os.environ.get("CI"))
settings.load_profile("ci" if IN_CI else "here")


# Replicas share this process, and processes this machine: threads that wait for each other by spinning would
# take the cores from those that compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TURNS = pytest.StashKey[Turns]()

HANG_SECONDS = 1000
"""How long a test may hang where no signal reaches it: the process then prints all stacks, and ends."""

STDERR = pytest.StashKey[int]()
ARMED_AT = pytest.StashKey[float]()


def expect_progress(item: pytest.Item) -> None:
    """Arm the timer for a test; pytest's own is armed for every test, which takes a thread each."""
    stash, now, limit = item.config.stash, time.monotonic(), item.get_closest_marker("timeout")
    seconds = max(HANG_SECONDS, 1.2 * limit.args[0] if limit is not None else 0)
    if seconds > HANG_SECONDS or now - stash.get(ARMED_AT, -HANG_SECONDS) > HANG_SECONDS / 10:
        faulthandler.dump_traceback_later(seconds, exit=True, file=stash[STDERR])
        stash[ARMED_AT] = now if seconds == HANG_SECONDS else -HANG_SECONDS


def pytest_exception_interact(node: pytest.Item) -> None:
    """Have the timer armed again, because pytest disarms it after a failure."""
    node.config.stash[ARMED_AT] = -HANG_SECONDS


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the runs of tests out of the list of runs of the user who runs them."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say in which order tests are handed out."""
    arrange(items, Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let no garbage collection look through all that tests are made of: thousands of them, and torch."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    """Say which tests stay together."""
    return Scheduler(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Take part in the turns of a session of several processes, whose folders have one parent."""
    config.stash[STDERR] = os.dup(2)  # as it is while pytest captures no output
    is_worker = hasattr(config, "workerinput")
    if is_worker:
        config.stash[TURNS] = Turns(Path(config.option.basetemp).parent)
    if is_worker or not config.getoption("numprocesses", None):
        let_programs_heed_signals()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Wait for a test's turn, which takes nothing of the time that the test has."""
    turns = item.config.stash.get(TURNS, None)
    alone = contextlib.nullcontext()
    with alone if turns is None else turns.turn(serial=is_serial(item), next_is_serial=is_serial(nextitem)):
        expect_progress(item)
        try:
            return (yield)
        finally:
            if nextitem is None:
                faulthandler.cancel_dump_traceback_later()
            if nextitem is None or nextitem.path != item.path:
                # The product searches all unfrozen objects for the module that holds a parameter, so whatever
                # a module of tests leaves would slow down the later ones. It also hides a model from that
                # search: a model must not outlive its module of tests.
                gc.collect()
                gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test whose programs only Go could build, where there is no Go (see `tools.assets`).

    Let a skipped test fail in CI, which has all that tests ask for but a GPU and what only those get who
    ask for it: nobody would see that it was skipped.
    """
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, MissingError):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {call.excinfo.value}")
    counts = IN_CI and report.skipped and not {"gpu", "on_request"} & report.keywords.keys()
    if counts and isinstance(report.longrepr, tuple):  # an expected failure has a traceback
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr[2]}"
    return report
