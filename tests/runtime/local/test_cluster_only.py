"""What this machine says of jobs that ask for what only a cluster has: the table that a cluster serves."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import pytest

from fleet_operator.api import Role, parse_job
from fleet_operator.cli.local_job import RunOptions, prepare
from fleet_operator.cli.run import run_job
from fleet_operator.errors import InvalidJob
from fleet_operator.local.limits import not_applied
from tests.support.cluster_only import CLUSTER_ONLY, filled
from tests.support.local import Lines, job_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster_only import ClusterOnly

pytestmark = pytest.mark.timeout(60)

IMAGE = "image"  # which no container here has


@pytest.mark.parametrize("case", [pytest.param(each, id=each.id) for each in CLUSTER_ONLY])
def test_on_this_machine(case: ClusterOnly):
    document = filled(
        case, job_manifest("pass", server=None if case.collective else "pass", trainers=2, servers=2)
    )
    if case.refused is None:
        job = prepare(parse_job(document))
        assert set(not_applied(job.to_manifest())) == {IMAGE, *case.left_out} != {IMAGE}
        return
    with pytest.raises(InvalidJob) as refused:
        prepare(parse_job(document))
    [problem] = refused.value.problems
    assert problem.path == case.refused
    assert len(problem.expected.split()) > 3, "a sentence says what to do"


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux can no descendant of a supervisor hide")
async def test_all_that_is_left_out_is_said_once_and_the_job_runs(tmp_path: Path):
    document = job_manifest("open('done', 'w')")
    left_out = {IMAGE}
    for case in CLUSTER_ONLY:
        if case.refused is None:
            document = filled(case, document)
            left_out |= set(case.left_out)
    # Of these every case has one; together they are none that the API knows.
    document["spec"]["podGroupPolicy"] = {"volcano": {}}
    document["spec"]["scheduling"] = {"priorityClassName": "high"}
    options = RunOptions(
        workdirs=dict.fromkeys(Role, tmp_path), logs=tmp_path / "logs", environ=os.environ, timeout_seconds=50
    )
    display = Lines()
    result = await asyncio.wait_for(run_job(prepare(parse_job(document)), options, display), 55)
    assert result.exit_status == 0, display.said
    [said] = [line for line in display.said if line.startswith("not applied on this machine: ")]
    names = said.partition(": ")[2].split(", ")
    assert sorted(names) == sorted(left_out)
