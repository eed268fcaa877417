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


def test_the_page_of_a_run_that_failed_says_why(tmp_path):
    job = job_manifest("raise SystemExit('no <data>')", server=None, runPolicy={"backoffLimit": 0})
    with LocalRun(tmp_path / "run", job) as run:
        assert run.wait() == 1, run.stderr
    page = (run.logs / "summary.html").read_text()
    assert '<span class="Failed">Failed</span>' in page
    assert "exit code 1: no &lt;data&gt;" in page
    assert "no trainer reported a loss" in page
