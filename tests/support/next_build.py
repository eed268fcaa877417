"""A simulated later build of the operator: a copy of the current one with a few changed lines.

Copying fails if a line is not found, so that a change of the package cannot make both builds equal.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.operator_process import ROOT

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NextBuild"]

CHANGES = (
    # Ports are assigned from the end of a range.
    (
        "build/ports.py",
        "first=ports.first + place * width",
        "first=ports.last + 1 - (servers + job.most_trainers + place) * width",
    ),
    # The ledger has more fields, for the job and for each role.
    ("api/ledger.py", "    queue_name: str | None", "    pace: int = 0\n    queue_name: str | None"),
    ("api/ledger.py", "    ports: PortBlocks | None", "    speed: int = 0\n    ports: PortBlocks | None"),
    (
        "plan/observe/attempts.py",
        "            queued_since=self.queued_since,\n",
        "            queued_since=self.queued_since,\n            pace=7,\n",
    ),
    (
        "plan/observe/attempts.py",
        "                ports=own.ports,",
        "                ports=own.ports, speed=9,",
    ),
    # Replicas get one more environment variable, and the spec has one more field.
    (
        "build/env.py",
        '        "FLEET_JOB_NAME": job.name,',
        '        "FLEET_JOB_NAME": job.name, "FLEET_BUILD": "next",',
    ),
    (
        "api/job.py",
        "    ttl_seconds_after_finished: Seconds | None",
        (
            '    archive: StrictBool = Field(default=False, description="New.")\n'
            "    ttl_seconds_after_finished: Seconds | None"
        ),
    ),
)


class NextBuild:
    """A copy of the operator that simulates a later build.

    Parameters
    ----------
    folder : Path
        The folder for the copy.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "src"
        package = self.path / "fleet_operator"
        shutil.copytree(
            ROOT / "operator" / "src" / "fleet_operator",
            package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for name, before, after in CHANGES:
            file = package / name
            text = file.read_text()
            if text.count(before) != 1:
                raise AssertionError(
                    f"{name} has {before!r} {text.count(before)} times, expected once: adapt CHANGES"
                )
            file.write_text(text.replace(before, after))

    def definition(self) -> str:
        """Return the CustomResourceDefinition of the later build."""
        done = subprocess.run(
            [sys.executable, "-m", "fleet_operator.api.crd"],
            env={**os.environ, "PYTHONPATH": str(self.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout
