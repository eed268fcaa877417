"""``fleetjob ui`` shows a job of the cluster while it trains: its curve, its logs and its replicas.

The page reads the curve from the trainer itself, through the API server, and logs through the kubelet.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support.fleetjob import ui_page

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import NewNamespace
    from tests.support.e2e.kubectl import Kubectl

START_SECONDS = 240.0
SHOWN_SECONDS = 120.0


def job_that_trains_on() -> dict[str, Any]:
    """Return the digits job, with more epochs than any test waits for."""
    job: dict[str, Any] = yaml.safe_load(Path("examples/digits/fleetjob.yaml").read_text())
    job["spec"]["template"]["spec"]["containers"][0]["command"] += ["--epochs", "1000000"]
    return job


@pytest.fixture
def namespace(new_namespace: NewNamespace) -> Iterator[Kubectl]:
    with new_namespace("ui") as kubectl:
        yield kubectl


async def shown(kubectl: Kubectl, state: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the page's data of the job, once it has the trainer's own curve, and of trainer 1's log."""
    namespace = str(kubectl.namespace)
    name = f"{namespace}/digits"
    async with asyncio.timeout(SHOWN_SECONDS), ui_page(kubectl.kubeconfig, namespace, state) as page:
        # Each answer may add one point from the job's status; only the trainer's history has more.
        job, answers = await page.ask("job", id=name), 1
        while job["curves_note"] or len(job["series"].get("loss", {}).get("trainer-0", ())) <= answers:
            await asyncio.sleep(5)
            job, answers = await page.ask("job", id=name), answers + 1
        return job, await page.ask("log", id=name, replica="trainer-1")


def test_the_page_has_the_curve_of_a_trainer_that_is_still_training(namespace: Kubectl, tmp_path: Path):
    namespace("apply", "-f", "-", stdin=json.dumps(job_that_trains_on()))
    namespace.wait_until(
        "fleetjobs",
        "digits",
        lambda job: job.get("status", {}).get("progress", {}).get("step", 0) > 0,
        timeout=START_SECONDS,
        what="to make a step",
    )
    job, log = asyncio.run(shown(namespace, tmp_path))
    assert (job["state"], job["curves_note"]) == ("Running", None)
    assert {each["name"] for each in job["replicas"]} == {"pserver-0", "pserver-1", "trainer-0", "trainer-1"}
    assert "trainer-0" in job["series"]["test_accuracy"]
    assert log["lines"]
    assert "note" not in log
