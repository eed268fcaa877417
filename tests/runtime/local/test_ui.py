"""``fleetjob ui`` in a browser: the jobs of this machine, and a cluster that comes and goes.

With ``UI_PICTURES=FOLDER`` in the environment, the last test writes its pictures there (docs/images).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from fleet_operator.cli.ui.cluster import ClusterJobs
from fleet_operator.cli.ui.machine import LocalRuns
from fleet_operator.cli.ui.server import UiServer
from fleet_operator.client.session import Where
from tests.support.browser import browser_page, find_browser
from tests.support.fleetjob import PROGRAM, lines
from tests.support.local import DONE, LocalRun, job_manifest
from tests.support.log_server import LogServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.browser import Page

BROWSER = find_browser()
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what is left"),
    pytest.mark.skipif(BROWSER is None, reason="no browser is installed (Debian: chromium)"),
]

HOSTILE = "</pre><script>document.title = 'taken'</script><img src='http://127.0.0.1:9/x'>"
# Serves its progress as `fleet` does. Trainer 1 fails in its first life. Goes on when `go-on` is there.
TRAINER = f"""
import http.server, json, math, os, pathlib, threading, time
index, rate = int(os.environ["PADDLE_TRAINER_ID"]), float(os.environ.get("RATE", "0.02"))
step = 200
def progress():
    steps = range(8, step + 1, 8)
    losses = [2.3 * math.exp(-rate * at) + 0.05 * math.sin(at * (index + 2)) for at in steps]
    history = [[at, round(loss, 4)] for at, loss in zip(steps, losses)]
    accuracy = {{"test_accuracy": 1 - math.exp(-rate * step), "a<i>b": 0.25}}
    return json.dumps({{"step": step, "totalSteps": 400, "loss": history[-1][1], "history": history,
                       "samplesPerSecond": 1234.5, "metrics": accuracy, "memoryBytes": 2 ** 28}})
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(progress().encode())
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer((os.environ["POD_IP"], 6180), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("loss & accuracy <b>of trainer", index, "</b>", flush=True)
print({HOSTILE!r}, flush=True)
if index == 1 and os.environ["FLEET_RESTARTS"] == "0":
    raise SystemExit(3)
while not pathlib.Path("go-on").exists():
    time.sleep(0.02)
print("the last line", flush=True)
step = 400
pathlib.Path(os.environ["FLEET_TERMINATION_LOG"]).write_text(progress())
{DONE}
"""


def cells(rows: str) -> str:
    return f"[...{rows}].map(row => [...row.cells].map(cell => cell.innerText))"


ROWS = cells("document.querySelectorAll('#jobs tbody tr')")
LOSS = "document.querySelector('figure[data-metric=loss]')"


def manifest(name: str, rate: float) -> dict[str, object]:
    env = [{"name": "RATE", "value": str(rate)}]
    return job_manifest(TRAINER, trainers=2, name=name, env=env)


@contextlib.asynccontextmanager
async def ui(state: Path, *options: str) -> AsyncIterator[str]:
    """Start ``fleetjob ui`` without a cluster, and give the address that it prints."""
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        "ui",
        "--no-cluster",
        "--port=0",
        *options,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "XDG_STATE_HOME": str(state)},
    )
    try:
        async with asyncio.timeout(60):
            told = await anext(lines(process.stdout))
        yield told.split()[2]
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def watched_run(folder: Path) -> AsyncIterator[tuple[LocalRun, Page, str]]:
    """Start a job; give its run, the page on which a browser shows it, and the address of the page."""
    assert BROWSER is not None
    state = folder / "state"
    with LocalRun(folder / "run", manifest("my-job", 0.02), environ={"XDG_STATE_HOME": str(state)}) as run:
        async with ui(state) as address, browser_page(BROWSER, folder / "browser") as page:
            await page.open(address)
            yield run, page, address


async def test_the_page_follows_a_run_from_its_restart_to_its_end(tmp_path):
    async with watched_run(tmp_path) as (run, page, address):
        # The table is live, and the run is found without being named.
        await page.until(f"({ROWS})[0]?.[3] === 'Running' && ({ROWS})[0][4].includes('200/400')")
        await page.until(f"({ROWS})[0][7] === '1'")  # the restart of trainer 1
        await page.until("document.querySelectorAll('#timeline rect').length === 4")
        told = await page.value(
            "[...document.querySelectorAll('#timeline title')].map(each => each.textContent)"
        )
        assert sorted((each.split(",")[0], "exit code 3" in each, "running" in each) for each in told) == [
            ("pserver-0", False, True),
            ("trainer-0", False, True),
            ("trainer-1", False, True),
            ("trainer-1", True, False),
        ]
        assert "trainer-1 failed with exit code 3" in await page.value("events.innerText")
        assert "token" not in await page.value("location.href")

        # The log follows, and what is in it stays text.
        await page.until("document.getElementById('log').textContent.includes('of trainer')")
        assert HOSTILE in await page.value("document.getElementById('log').textContent")
        assert "a<i>b" in await page.value("charts.innerText")

        # The curves: what they are where the mouse is, and zoom.
        await page.resize(1280, 1400)
        await page.until(f"{LOSS}.querySelectorAll('.curve').length === 2")
        await page.value(f"{LOSS}.scrollIntoView()")
        box = await page.value(
            f"JSON.parse(JSON.stringify({LOSS}.querySelector('svg').getBoundingClientRect()))"
        )
        y = box["y"] + box["height"] / 2
        await page.mouse("mouseMoved", box["x"] + box["width"] / 2, y)
        await page.until(f"!{LOSS}.querySelector('.tip').hidden")
        tip = await page.value(f"{LOSS}.querySelector('.tip').innerText")
        step = int(tip.split()[1])
        losses = [2.3 * math.exp(-0.02 * step) + 0.05 * math.sin(step * (index + 2)) for index in (0, 1)]
        assert tip.splitlines()[1:] == [
            f"trainer-{index}: {round(loss, 4):.6g}" for index, loss in enumerate(losses)
        ]
        left = {"button": "left", "clickCount": 1, "buttons": 1}
        await page.mouse("mousePressed", box["x"] + 200, y, **left)
        await page.mouse("mouseMoved", box["x"] + 300, y, **left)
        await page.mouse("mouseReleased", box["x"] + 300, y, **left)
        await page.until(f"!{LOSS}.querySelector('button').hidden")
        await page.value(f"{LOSS}.querySelector('button').click()")
        assert await page.value(f"{LOSS}.querySelector('button').hidden")

        assert "the last line" not in await page.value("document.getElementById('log').textContent")
        (run.folder / "go-on").touch()
        await page.until("document.getElementById('log').textContent.includes('the last line')")
        assert run.wait() == 0, run.stderr
        await page.until(f"({ROWS})[0][3] === 'Succeeded' && ({ROWS})[0][4].includes('400/400')")
        assert await page.value("document.title") == "my-job: Succeeded"
        origin = address.partition("?")[0]
        assert [url for url in page.requested if not url.startswith((origin, "data:"))] == []
        assert page.complaints == []


async def test_a_killed_runner_is_seen(tmp_path):
    async with watched_run(tmp_path) as (run, page, _):
        await page.until(f"({ROWS})[0]?.[3] === 'Running'")
        run.process.kill()
        await page.until(f"({ROWS})[0][3] === 'Lost'")
        await page.until("sentence.innerText.includes('no process of the run is left')")


@contextlib.asynccontextmanager
async def page_of_a_cluster(world: LogServer, folder: Path) -> AsyncIterator[tuple[UiServer, Page]]:
    """Give the server of a page, and the page, for a cluster with one job."""
    assert BROWSER is not None
    async with world.kubeconfig(folder) as kubeconfig:
        server = UiServer(LocalRuns([]), ClusterJobs(Where(kubeconfig)), token="token")
        address = await server.start(0)
        try:
            async with browser_page(BROWSER, folder / "browser") as page:
                await page.open(address)
                await page.until(f"({ROWS})[0]?.[3] === 'Running'")
                await page.until("!detail.hidden && replica.value === 'trainer-0'")
                yield server, page
        finally:
            await server.close()


async def test_when_the_cluster_does_not_answer_the_last_rows_stay_and_say_of_when_they_are(tmp_path):
    world = LogServer()
    world.put(0)
    async with page_of_a_cluster(world, tmp_path) as (_, page):
        assert await page.value("document.querySelectorAll('.stale').length") == 0
        world.is_down = True
        await page.until("document.querySelector('#jobs tbody tr').classList.contains('stale')")
        await page.until("detail.classList.contains('stale')")
        assert (await page.value(ROWS))[0][1:4] == ["default/digits", "namespace default", "Running"]
        for place in ("where", "problem"):
            told = await page.value(f"document.getElementById('{place}').textContent")
            assert re.search(r"as it was at \d\d:\d\d:\d\d: .*the server is down", told), told
        assert await page.value("document.title") == "digits: Running"
        world.is_down = False
        await page.until("document.querySelectorAll('.stale').length === 0 && problem.hidden")


async def test_when_the_command_has_ended_the_page_keeps_what_it_had(tmp_path):
    world = LogServer()
    world.put(0)
    async with page_of_a_cluster(world, tmp_path) as (server, page):
        await server.close()
        await page.until("document.querySelectorAll('#jobs .stale').length === 1")
        told = await page.value("problem.textContent")
        assert re.search(r"as it was at \d\d:\d\d:\d\d: no answer from fleetjob ui", told), told


async def test_runs_are_compared_in_light_and_dark_and_on_a_phone(tmp_path):
    assert BROWSER is not None
    for name, rate in (("slow-rate", 0.01), ("high-rate", 0.03)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "go-on").touch()
        with LocalRun(folder, manifest(name, rate)) as run:
            assert run.wait() == 0, run.stderr
        run.logs.rename(tmp_path / f"{name}-logs")
    named = ("--runs", str(tmp_path))
    async with ui(tmp_path / "state", *named) as address, browser_page(BROWSER, tmp_path / "browser") as page:
        await page.resize(1280, 1250)
        await page.open(address)
        await page.until(f"({ROWS}).length === 2")
        await page.value("document.querySelectorAll('#jobs input').forEach(each => each.click())")
        await page.until(f"{LOSS}?.querySelectorAll('.curve').length === 4")
        compared = f"Object.fromEntries({cells('compared.rows')}.map(([name, ...values]) => [name, values]))"
        await page.until(f"({compared}).test_accuracy?.length === 2")
        table = await page.value(compared)
        assert table[""] == ["high-rate-logs", "slow-rate-logs"]
        assert table["test_accuracy"] == ["0.999994", "0.981684"]
        assert table["state"] == ["Succeeded", "Succeeded"]
        colours = {}
        for scheme in ("light", "dark"):
            await page.prefer(scheme)
            colours[scheme] = await page.value("getComputedStyle(document.body).backgroundColor")
        assert colours == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 18, 18)"}
        await page.prefer("light")
        await page.resize(480, 900)
        await page.until(f"{LOSS}.querySelector('svg').clientWidth < 480")
        assert await page.value("document.documentElement.scrollWidth") <= 480
        assert page.complaints == []


PICTURES = os.environ.get("UI_PICTURES", "")
DIGITS = Path(__file__).parents[3] / "examples" / "digits"


@pytest.mark.on_request
@pytest.mark.skipif(not PICTURES, reason="UI_PICTURES names no folder for pictures")
async def test_pictures_of_two_runs_of_an_example(tmp_path):
    assert BROWSER is not None
    logs = tmp_path / "logs"
    for rate in ("0.01", "0.1"):
        job = yaml.safe_load((DIGITS / "fleetjob.yaml").read_text())
        job["spec"]["template"]["spec"]["containers"][0]["command"] += ["--lr", rate]
        with LocalRun(tmp_path / rate, job, ("--workdir", str(DIGITS.parents[1]))) as run:
            assert run.wait(200) == 0, run.stderr
        logs.mkdir(exist_ok=True)
        run.logs.rename(logs / f"digits-lr-{rate}")
    sizes = (("light", "light", 1280), ("dark", "dark", 1280), ("480", "light", 480))
    named = ("--runs", str(logs))
    async with ui(tmp_path / "state", *named) as address, browser_page(BROWSER, tmp_path / "browser") as page:
        await page.resize(1280, 1000)
        await page.open(address)
        await page.until(f"({ROWS}).length === 2")
        await page.value("document.querySelectorAll('#jobs input').forEach(each => each.click())")
        await page.until(f"{LOSS}?.querySelectorAll('.curve').length === 4")
        await page.value("folder.hidden = true")  # the path says where the test ran
        for name, scheme, width in sizes:
            await page.prefer(scheme)
            await page.resize(width, 1000)
            drawn = f"{LOSS}.querySelector('svg').viewBox.baseVal.width"
            await page.until(f"Math.abs({drawn} - {LOSS}.clientWidth) < 1")
            picture = Path(PICTURES) / f"ui-{name}.png"
            await asyncio.to_thread(picture.write_bytes, await page.picture())
