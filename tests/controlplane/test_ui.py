"""``fleetjob ui`` against a real API server, with the operator at work."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.support.browser import browser_page, find_browser
from tests.support.digits_job import SERVERS, TRAINERS
from tests.support.fleetjob import ui_page
from tests.support.jobs import manifest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.controlplane import ControlPlane
    from tests.support.kube import Namespace

BROWSER = find_browser()
FAILED = '{"step": 2, "totalSteps": 4, "loss": 0.5, "history": [[1, 1.0], [2, 0.5]]}'


def without_count(message: str) -> str:
    """Leave out how often an event occurred: only the timing decides whether it is written once or twice."""
    return re.sub(r" \(x\d+\)$", "", message)


async def test_the_page_has_a_job_s_restart_its_conditions_and_its_curve(
    control_plane: ControlPlane, namespace: Namespace, tmp_path: Path
):
    async with ui_page(control_plane.admin.kubeconfig, namespace.name, tmp_path) as page:
        assert (await page.ask("jobs"))["jobs"] == []
        await namespace.create_job(manifest())
        await namespace.until_state("digits", "Running")
        [row] = (await page.ask("jobs"))["jobs"]
        assert (row["id"], row["state"]) == (f"{namespace.name}/digits", "Running")
        running = await page.ask("job", id=row["id"])  # kwok's pods have no process that would answer
        assert "trainer-0's own history could not be read" in running["curves_note"]
        await namespace.end(TRAINERS[0], exit_code=137)
        await namespace.until_job("digits", "a restart", lambda job: job["status"].get("restarts", 0) >= 1)
        await namespace.until_running("digits", *SERVERS, *TRAINERS)
        await namespace.end(*TRAINERS, message=FAILED)
        await namespace.until_state("digits", "Succeeded")
        job = await page.ask("job", id=row["id"])
        assert (job["state"], job["restarts"]) == ("Succeeded", 1)
        assert ("Complete", "True") in [(each["type"], each["status"]) for each in job["conditions"]]
        assert job["series"]["loss"]["trainer-0"] == [[1, 1.0], [2, 0.5]]
        assert "trainer-0" in [each["name"] for each in job["replicas"]]

        written = await namespace.until_told("digits", "Started", "ReplicaFailed", "Succeeded")
        job = await page.ask("job", id=row["id"])
        told = [(each["type"], each["reason"], without_count(each["message"])) for each in job["events"]]
        assert set(told) == set(written)
        assert any(kind == "Warning" and "digits-trainer-0" in message for kind, _, message in told)
        if BROWSER is not None:
            async with browser_page(BROWSER, tmp_path / "browser") as browser:
                await browser.open(page.address)
                curves = "document.querySelectorAll('figure[data-metric=loss] .curve').length"
                await browser.until(f"{curves} === 2")
                assert "Complete" in await browser.value("conditions.innerText")
                assert await browser.value("document.querySelectorAll('#events .Warning').length") >= 1
                assert await browser.value("document.title") == "digits: Succeeded"
                assert browser.complaints == []
