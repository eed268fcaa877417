"""Runs programs to completion within a time limit; failures report all output."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class CommandError(AssertionError):
    """A program failed or timed out; the message contains its command line and output."""


def run(
    *command: str | Path, timeout: float, stdin: str | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Run `command` and return its standard output.

    Raises
    ------
    CommandError
        The command did not end with status 0 within `timeout` seconds.
    """
    line = " ".join(str(word) for word in command)
    try:
        ended = subprocess.run(
            [str(word) for word in command],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        raise CommandError(f"{line}: not done after {timeout:.0f} s\n{_text(expired.stdout)}") from None
    if ended.returncode != 0:
        raise CommandError(
            f"{line}: exit status {ended.returncode}\n{ended.stdout[-4000:]}{ended.stderr[-4000:]}"
        )
    return ended.stdout


def run_visibly(*command: str | Path, timeout: float, env: Mapping[str, str] | None = None) -> None:
    """Run a long `command` and show its output as it appears.

    Raises
    ------
    CommandError
        The command did not end with status 0 within `timeout` seconds.
    """
    line = " ".join(str(word) for word in command)
    print(f"+ {line}", flush=True)
    try:
        ended = subprocess.run([str(word) for word in command], timeout=timeout, env=env, check=False)
    except subprocess.TimeoutExpired:
        raise CommandError(f"{line}: not done after {timeout:.0f} s") from None
    if ended.returncode != 0:
        raise CommandError(f"{line}: exit status {ended.returncode}; its output is above")


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
