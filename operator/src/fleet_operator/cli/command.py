"""The ``run`` command: shows progress during a run, and a summary and loss curves afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from fleet_operator.api import Role
from fleet_operator.cli.display import DisplayHandler, LineDisplay, TableDisplay
from fleet_operator.cli.given import check_folders, describe
from fleet_operator.cli.lines import now
from fleet_operator.cli.local_job import RunOptions, prepare
from fleet_operator.cli.page import Picture, draw_loss_curves, render_page
from fleet_operator.cli.result import to_json, to_text
from fleet_operator.cli.run import run_job
from fleet_operator.cli.run_record import runs_folder
from fleet_operator.cli.scalars import Scalars
from fleet_operator.cli.workdir import choose_workdirs
from fleet_operator.local.log import last_lines, printable, tail
from fleet_operator.plan.observe.termination_message import last_traceback

if TYPE_CHECKING:
    from pathlib import Path

    from fleet_operator.api import FleetJob
    from fleet_operator.cli.display import Display
    from fleet_operator.cli.run import RunResult
    from fleet_operator.local.container import Given

CURVE = "loss.png"
PAGE = "summary.html"
PAGE_LINES = 40  # of each log, on the HTML page
SHOWN_LINES = 12  # of the traceback or log of the replica that caused the job to fail


def run_command(
    job: FleetJob,
    *,
    manifest: Path,
    workdir: Path | None,
    logs: Path,
    as_json: bool,
    timeout_seconds: float | None,
    given: Given,
    follow: bool,
    tensorboard: Path | None,
    no_restart: bool = False,
) -> int:
    """Run a job, show its progress and result, and return the exit status."""
    job = prepare(job, given, no_restart=no_restart)
    check_folders(job, given)
    workdirs = choose_workdirs(job, manifest, workdir, given.volumes)
    console = Console(stderr=True)
    display: Display = TableDisplay(console, now) if console.is_terminal else LineDisplay(console, now)
    logger = logging.getLogger("fleet_operator")
    handler = DisplayHandler(display)
    logger.addHandler(handler)
    scalars = None
    if tensorboard is not None:
        scalars = Scalars(tensorboard / logs.name)
        display.say(f"scalars for TensorBoard: {tensorboard / logs.name}")
    for remark in (*workdirs.remarks, *describe(job, given)):
        display.say(remark)
    try:
        runs = None
        with contextlib.suppress(RuntimeError):  # a user without a home directory
            runs = runs_folder(os.environ)
        options = RunOptions(
            workdirs.folders, logs, dict(os.environ), timeout_seconds, given, follow, scalars, runs
        )
        result = asyncio.run(run_job(job, options, display))
    finally:
        logger.removeHandler(handler)
        if scalars is not None:
            scalars.close()
    _write_page(result, logs, _draw(result, logs / CURVE, display), display)
    text = "\n".join([to_text(result), *_last_words(result, logs)])
    if as_json:
        # A closed standard error must not suppress the JSON result.
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
        print(json.dumps(to_json(result)), flush=True)
    else:
        print(text, flush=True)
    return result.exit_status


def _last_words(result: RunResult, logs: Path) -> list[str]:
    """Return the end of the failed replica's log, and the log's path."""
    replica = result.failing
    if replica is None or replica.pod is None:
        return []
    log = logs / f"{replica.name}.log"
    try:
        lines = [printable(line) for line in tail(log, replica.pod.log_start).splitlines()]
    except OSError:
        return []
    shown = (last_traceback(lines) or lines)[-SHOWN_LINES:]
    return [f"  the last lines of {replica.name}, from {log}:", *(f"    {line}" for line in shown)]


def _draw(result: RunResult, path: Path, display: Display) -> Picture | str:
    """Plot the loss curves to a file; return the curves, or the reason if they cannot be drawn."""
    curves = {
        replica.name: replica.progress.history
        for replica in result.view.replicas.values()
        if replica.role is Role.TRAINER and replica.progress is not None
    }
    if not any(curves.values()):
        return "no trainer reported a loss with its step (fleet.report)"
    try:
        picture = draw_loss_curves(curves, result.view.job.name)
    except ImportError:
        missing = "matplotlib is not installed (pip install 'fleet-operator[cli]')"
        display.say(f"no loss curve: {missing}")
        return missing
    try:
        path.write_bytes(picture.light)
        display.say(f"loss curve: {path}")
    except OSError as error:
        display.say(f"no loss curve: {path} cannot be written: {error.strerror}")
    return picture


def _write_page(result: RunResult, logs: Path, picture: Picture | str, display: Display) -> None:
    """Write the summary to the log folder as an HTML page."""
    tails: dict[str, list[str]] = {}
    for replica in result.view.replicas.values():
        with contextlib.suppress(FileNotFoundError):  # the replica was never started, and has no log
            tails[replica.name] = last_lines(logs / f"{replica.name}.log", PAGE_LINES)
    page = logs / PAGE
    try:
        page.write_text(render_page(result, picture, tails), encoding="utf-8")
        display.say(f"summary: {page}")
    except OSError as error:
        display.say(f"no summary: {page} cannot be written: {error.strerror}")
