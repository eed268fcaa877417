"""A headless browser, controlled through the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
SECONDS = 60  # a browser is slow to start on a busy machine


def find_browser() -> str | None:
    """Return the path of a browser that is installed on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Page:
    """An open page in the browser, with its requests and errors."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.requested: list[str] = []
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a DevTools method and return its result."""
        self._number += 1
        number = self._number
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return dict((await self._receive(lambda message: message.get("id") == number)).get("result", {}))

    async def open(self, url: str) -> None:
        """Open a page and wait until it has loaded completely."""
        for domain in ("Page", "Network", "Log", "Runtime"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self._receive(lambda message: message.get("method") == "Page.loadEventFired")

    async def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true on the page."""
        waiting = (
            "new Promise(done => { const look = () => { if (CONDITION) done(); else setTimeout(look, 20); };"
            " look(); })"
        )
        expression = waiting.replace("CONDITION", condition)
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer

    async def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move the mouse, or press or release its left button, at a position in the window."""
        await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    async def picture(self) -> bytes:
        """Return a screenshot of the window as a PNG file."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    async def resize(self, width: int, height: int = 800) -> None:
        """Resize the window that shows the page."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def prefer(self, scheme: str) -> None:
        """Set the preferred colour scheme, light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def _receive(self, wanted: Any) -> dict[str, Any]:
        async with asyncio.timeout(SECONDS):
            while True:
                message: dict[str, Any] = await self._socket.receive_json()
                params = message.get("params", {})
                if message.get("method") == "Network.requestWillBeSent":
                    self.requested.append(params["request"]["url"])
                elif message.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                    self.complaints.append(str(params))
                if wanted(message):
                    return message


@contextlib.asynccontextmanager
async def browser_page(program: str, folder: Path) -> AsyncIterator[Page]:
    """Start a browser with its files in `folder`, and yield an empty page."""
    process = await asyncio.create_subprocess_exec(
        program,
        "--headless=new",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession() as session:
            port = await _port(process)
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                [page] = [each for each in await response.json() if each["type"] == "page"]
            socket = await session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
            yield Page(socket)
            await socket.send_json({"id": 0, "method": "Browser.close"})
            await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _port(process: asyncio.subprocess.Process) -> int:
    """Return the port on which the browser reports that it listens."""
    assert process.stderr is not None
    while line := (await process.stderr.readline()).decode(errors="replace"):
        if line.startswith("DevTools listening on ws://"):
            return int(line.rpartition(":")[2].partition("/")[0])
    raise AssertionError("the browser has ended at once")
