"""The command line as people run it: a process of its own, with a kubeconfig and nothing else."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

PROGRAM = Path(sys.executable).parent / "fleetjob"
SECONDS = 40.0


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


class Fleetjob:
    """``fleetjob`` for one kubeconfig and one namespace."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self.namespace = namespace
        self.environ = {**os.environ, "KUBECONFIG": str(kubeconfig), "COLUMNS": "200", "NO_COLOR": "1"}

    async def __call__(
        self, *arguments: str, program: Path | str = PROGRAM, environ: Mapping[str, str] | None = None
    ) -> Ended:
        """Run a command to its end; it prints no traceback, whatever happens."""
        process = await self.start(*arguments, program=program, environ=environ)
        try:
            async with asyncio.timeout(SECONDS):
                out, err = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise AssertionError(f"{' '.join(arguments)} did not end within {SECONDS:g} s") from None
        assert "Traceback" not in err.decode()
        return Ended(process.returncode or 0, out.decode(), err.decode())

    async def start(
        self,
        *arguments: str,
        program: Path | str = PROGRAM,
        stdout: int = asyncio.subprocess.PIPE,
        environ: Mapping[str, str] | None = None,
    ) -> asyncio.subprocess.Process:
        """Start a command; whoever does, ends it."""
        return await asyncio.create_subprocess_exec(
            str(program),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=asyncio.subprocess.PIPE,
            env={**self.environ, **(environ or {})},
        )


async def lines(stream: asyncio.StreamReader | None) -> AsyncIterator[str]:
    """Give what a command prints, line by line, as it comes."""
    assert stream is not None
    while line := await stream.readline():
        yield line.decode().rstrip("\n")
