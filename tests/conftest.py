"""Settings that every test shares."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Generator

# How long an example takes says how busy the machine is; what it shows is the same. CI draws the same
# examples each time, so that a change is judged by what it changed.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, print_blob=True)
IN_CI = bool(os.environ.get("CI"))
settings.load_profile("ci" if IN_CI else "here")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a skipped test fail in CI, which has all that tests ask for: nothing would tell of its loss."""
    report = yield
    if IN_CI and report.skipped and isinstance(report.longrepr, tuple):  # an expected failure has a traceback
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr[2]}"
    return report
