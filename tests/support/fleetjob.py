"""The command line for tests: called in this process, or started as a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

from fleet_operator import cli

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

PROGRAM = Path(sys.executable).parent / "fleetjob"
SECONDS = 40.0


class Ended(NamedTuple):
    """The result of a command."""

    status: int
    out: str
    err: str


class Fleetjob:
    """Runs ``fleetjob`` with one kubeconfig and one namespace."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self.namespace = namespace
        self._own = {"KUBECONFIG": str(kubeconfig), "COLUMNS": "200", "NO_COLOR": "1"}
        self.environ = {**os.environ, **self._own}

    async def __call__(self, *arguments: str) -> Ended:
        """Run a command to its end in this process, which is faster than starting a process."""
        return await asyncio.to_thread(self._call, arguments)

    async def run(
        self, *arguments: str, program: Path | str = PROGRAM, environ: Mapping[str, str] | None = None
    ) -> Ended:
        """Run a command to its end in a separate process."""
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
        """Start a command; the caller must end it."""
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
    """Return a command's result, after checking that it printed no traceback."""
    assert "Traceback" not in err
    return Ended(status or 0, out, err)


async def lines(stream: asyncio.StreamReader | None) -> AsyncIterator[str]:
    """Yield the lines that a command prints as they appear."""
    assert stream is not None
    while line := await stream.readline():
        yield line.decode().rstrip("\n")
