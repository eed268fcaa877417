"""The `fleetjob` command line for tests, called in this process or in a separate one."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import aiohttp

from fleet_operator import cli

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

PROGRAM = Path(sys.executable).parent / "fleetjob"
SECONDS = 40.0


class Ended(NamedTuple):
    """The result of a completed command."""

    status: int
    out: str
    err: str


class Fleetjob:
    """The ``fleetjob`` command with a fixed kubeconfig and namespace."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self.namespace = namespace
        self._own = {"KUBECONFIG": str(kubeconfig), "COLUMNS": "200", "NO_COLOR": "1"}
        self.environ = {**os.environ, **self._own}

    async def __call__(self, *arguments: str) -> Ended:
        """Run a command to completion in this process, which is faster than starting a new process."""
        return await asyncio.to_thread(self._call, arguments)

    async def run(
        self, *arguments: str, program: Path | str = PROGRAM, environ: Mapping[str, str] | None = None
    ) -> Ended:
        """Run a command to completion in a separate process."""
        process = await self.start(*arguments, program=program, environ=environ)
        try:
            async with asyncio.timeout(SECONDS):
                out, err = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise AssertionError(f"{' '.join(arguments)} did not end within {SECONDS:g} s") from None
        return _ended(process.returncode, out.decode(), err.decode())

    async def start(
        self,
        *arguments: str,
        program: Path | str = PROGRAM,
        stdout: int = asyncio.subprocess.PIPE,
        environ: Mapping[str, str] | None = None,
    ) -> asyncio.subprocess.Process:
        """Start a command in a separate process, which the caller must end."""
        return await asyncio.create_subprocess_exec(
            str(program),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=asyncio.subprocess.PIPE,
            env={**self.environ, **(environ or {})},
        )

    def _call(self, arguments: tuple[str, ...]) -> Ended:
        status: int | str | None = None
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.object(sys, "argv", [str(PROGRAM), *arguments]),
            mock.patch.dict(os.environ, self._own),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                cli.main()
            except SystemExit as end:
                status = end.code
        return _ended(int(status or 0), out.getvalue(), err.getvalue())


def _ended(status: int | None, out: str, err: str) -> Ended:
    """Return the result of a command after checking that it has printed no traceback."""
    assert "Traceback" not in err
    return Ended(status or 0, out, err)


@dataclass(frozen=True)
class UiPage:
    """The page of a running ``fleetjob ui``."""

    address: str
    session: aiohttp.ClientSession

    async def ask(self, path: str, **query: str) -> dict[str, Any]:
        """Return the page's data of a path, such as ``jobs``."""
        url = self.address.replace("/?", f"/api/{path}?")
        async with self.session.get(url, params=query) as answer:
            assert answer.status == 200, await answer.text()
            document: dict[str, Any] = await answer.json()
            return document


@contextlib.asynccontextmanager
async def ui_page(kubeconfig: Path, namespace: str, state: Path) -> AsyncIterator[UiPage]:
    """Run ``fleetjob ui`` for a namespace, with `state` as the folder of local runs."""
    command = (str(PROGRAM), "ui", "--port=0", f"--kubeconfig={kubeconfig}", f"--namespace={namespace}")
    environ = {**os.environ, "XDG_STATE_HOME": str(state)}
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environ)
    try:
        async with asyncio.timeout(SECONDS):
            address = (await anext(lines(process.stdout))).split()[2]
        async with aiohttp.ClientSession() as session:
            yield UiPage(address, session)
    finally:
        process.terminate()
        await process.wait()


async def lines(stream: asyncio.StreamReader | None) -> AsyncIterator[str]:
    """Yield each line of a running command's output as it appears."""
    assert stream is not None
    while line := await stream.readline():
        yield line.decode().rstrip("\n")
