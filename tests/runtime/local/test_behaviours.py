"""What jobs do on this machine: the table that a cluster is held to as well."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING

import pytest

from fleet_operator.api import ConditionType, parse_job
from fleet_operator.cli.run import RunOptions, prepare, run_job
from tests.support.behaviours import BEHAVIOURS, LIFE
from tests.support.local import job_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fleet_operator.cli.view import JobView
    from tests.support.behaviours import Behaviour

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="only on Linux can a guardian's descendants not hide"),
]


class Lines:
    """A display that keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    @contextlib.contextmanager
    def showing(self, view: JobView) -> Iterator[None]:
        yield

    def refresh(self) -> None:
        """Show nothing that moves."""


@pytest.mark.parametrize("behaviour", [pytest.param(each, id=each.id) for each in BEHAVIOURS])
async def test_on_this_machine(tmp_path: Path, behaviour: Behaviour):
    lives = " ".join(f"{name}:{','.join(map(str, codes))}" for name, codes in behaviour.lives.items())
    document = job_manifest(
        LIFE,
        server=None if behaviour.collective else LIFE,
        trainers=2,
        servers=2,
        env=[{"name": "LIVES", "value": lives}],
        **behaviour.spec,
    )
    options = RunOptions(workdir=tmp_path, logs=tmp_path / "logs", environ=os.environ, timeout_seconds=50)
    display = Lines()
    result = await asyncio.wait_for(run_job(prepare(parse_job(document)), options, display), 55)
    status = result.view.status
    told = status.condition(ConditionType(behaviour.state))
    assert told is not None, display.said
    assert (status.state, told.reason) == (behaviour.state, behaviour.reason), told.message
    assert (status.failures, status.job_restarts) == (behaviour.failures, behaviour.job_restarts)
