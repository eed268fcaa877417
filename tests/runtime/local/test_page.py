"""The page at the end of a run, as a browser shows it."""

from __future__ import annotations

import sys

import pytest

from tests.support.browser import browser_page, find_browser
from tests.support.local import LocalRun, job_manifest

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what is left"),
]

BROWSER = find_browser()
CELLS = """
[...document.querySelectorAll("#replicas tbody tr")].map(row => [...row.cells].map(cell => cell.innerText))
"""
HOSTILE = "</pre><script>document.title = 'taken'</script><img src='http://127.0.0.1:9/x'>"
# Reports as `fleet` does at its end; fails in its first life.
TRAINER = f"""
import json, os, pathlib
print("\\x1b[31mloss & accuracy\\x1b[0m <b>of trainer", os.environ["PADDLE_TRAINER_ID"], "</b>")
print({HOSTILE!r})
print("epoch 1 " * 60)
if os.environ["PADDLE_TRAINER_ID"] + os.environ["FLEET_RESTARTS"] == "00":
    raise SystemExit(3)
progress = {{"step": 2, "totalSteps": 2, "loss": 0.5, "history": [[1, 1.0], [2, 0.5]]}}
progress["metrics"] = {{"a<i>b": 0.25}}
pathlib.Path(os.environ["FLEET_TERMINATION_LOG"]).write_text(json.dumps(progress))
if os.environ["FLEET_RESTARTS"] != "0":
    pathlib.Path("done").touch()
"""


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed (Debian: chromium)")
async def test_a_browser_shows_how_a_run_ended_and_asks_nobody(tmp_path):
    assert BROWSER is not None
    with LocalRun(tmp_path / "run", job_manifest(TRAINER, trainers=2, name="my-job")) as run:
        assert run.wait() == 0, run.stderr
    path = run.logs / "summary.html"
    assert f"summary: {path}\n" in run.stderr
    async with browser_page(BROWSER, tmp_path / "browser") as page:
        await page.open(path.as_uri())
        assert await page.value("document.title") == "my-job: Succeeded"
        rows = {name: (state, *rest) for name, state, _, _, *rest in await page.value(CELLS)}
        assert rows == {
            "pserver-0": ("Succeeded", "0", "0", "-", "-"),
            "trainer-0": ("Succeeded", "1", "3, 0", "2/2", "0.5"),
            "trainer-1": ("Succeeded", "0", "0", "2/2", "0.5"),
        }
        assert "a<i>b" in await page.value("document.querySelector('#metrics').innerText")
        width, height = await page.value(
            "[document.images[0].naturalWidth, document.images[0].naturalHeight]"
        )
        assert (width, height) == (840, 480)
        texts = await page.value("[...document.querySelectorAll('pre')].map(each => each.innerText)")
        assert len(texts) == 3
        assert "loss & accuracy <b>of trainer 0 </b>\n" in texts[1]
        assert HOSTILE in texts[1]
        assert texts[1].count("=== trainer-0 of my-job, attempt 0.") == 2
        for wide in (400, 1200):  # a table or a log that is wider can be moved within its own box
            await page.resize(wide)
            assert await page.value("document.documentElement.scrollWidth") <= wide
        assert [url for url in page.requested if not url.startswith(("data:image/png", path.as_uri()))] == []
        assert page.complaints == []


FAILING = """
import os, time
if os.environ["PADDLE_TRAINER_ID"] == "1":
    raise SystemExit("no <data>" + " anywhere" * 200)
time.sleep(60)
"""


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed (Debian: chromium)")
async def test_the_page_of_a_run_that_failed_begins_with_the_replica_that_did(tmp_path):
    assert BROWSER is not None
    job = job_manifest(FAILING, server=None, trainers=2, runPolicy={"backoffLimit": 0})
    with LocalRun(tmp_path / "run", job) as run:
        assert run.wait() == 1, run.stderr
    path = run.logs / "summary.html"
    assert "No picture: no trainer reported a loss with its step" in path.read_text()
    async with browser_page(BROWSER, tmp_path / "browser") as page:
        await page.open(path.as_uri())
        assert "exit code 1: no <data>" in await page.value("document.body.innerText")
        assert [row[0] for row in await page.value(CELLS)] == ["trainer-1", "trainer-0"]
        headings = await page.value("[...document.querySelectorAll('h2[class]')].map(each => each.innerText)")
        assert headings == ["trainer-1: Failed", "trainer-0: Stopped"]
        assert await page.value("document.links[0].href") == (run.logs / "trainer-1.log").as_uri()
        widths = "[...document.querySelectorAll('pre')].map(each => each.scrollWidth - each.clientWidth)"
        assert await page.value(widths) == [0, 0], "a long line is wrapped"
        colour = "getComputedStyle(document.querySelector('td.Failed')).color"
        for scheme, expected in (("light", "rgb(207, 34, 46)"), ("dark", "rgb(255, 123, 114)")):
            await page.prefer(scheme)
            assert await page.value(colour) == expected


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed (Debian: chromium)")
async def test_the_plot_is_dark_where_the_page_is(tmp_path):
    assert BROWSER is not None
    with LocalRun(tmp_path / "run", job_manifest(TRAINER, name="my-job")) as run:
        assert run.wait() == 0, run.stderr
    corner = """(() => {
        const canvas = document.createElement("canvas").getContext("2d");
        canvas.drawImage(document.images[0], 0, 0);
        return [...canvas.getImageData(1, 1, 1, 1).data];
    })()"""
    async with browser_page(BROWSER, tmp_path / "browser") as page:
        for scheme, expected in (("light", [255, 255, 255, 255]), ("dark", [18, 18, 18, 255])):
            await page.prefer(scheme)
            await page.open((run.logs / "summary.html").as_uri())
            assert await page.value(corner) == expected
